/** The theme's colours as a canvas needs them: worked out, not by name. */

let probe: HTMLElement | null = null;

export function colour(name: string): string {
  if (!probe) {
    probe = document.createElement("span");
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
