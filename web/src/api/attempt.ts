/** The key of one attempt to submit: the same text keeps it, so that a double click or a repeated request makes one run. */

export class Attempt {
  #text: string | null = null;
  #key = "";

  keyFor(text: string): string {
    if (text !== this.#text) {
      this.#text = text;
      this.#key = randomKey();
    }
    return this.#key;
  }
}

/** `crypto.randomUUID` is missing where the page is not on loopback or https. */
function randomKey(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
