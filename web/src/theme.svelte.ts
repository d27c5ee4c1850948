/** Light or dark: the system's, or the reader's own choice, kept in this browser. */

export type Theme = "light" | "dark";

const system = matchMedia("(prefers-color-scheme: dark)");

class ThemeChoice {
  chosen = $state<Theme | null>((document.documentElement.dataset.theme as Theme | undefined) ?? null);
  #systemDark = $state(system.matches);

  constructor() {
    system.addEventListener("change", ({ matches }) => (this.#systemDark = matches));
  }

  get shown(): Theme {
    return this.chosen ?? (this.#systemDark ? "dark" : "light");
  }

  toggle(): void {
    this.chosen = this.shown === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = this.chosen;
    try {
      localStorage.setItem("theme", this.chosen);
    } catch {
      // Storage is switched off: the choice holds until the page closes.
    }
  }
}

export const theme = new ThemeChoice();
