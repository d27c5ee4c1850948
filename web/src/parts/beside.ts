/** Places a tip of `position: fixed` below its anchor, or above where there is no room, inside the window. */

import type { Attachment } from "svelte/attachments";

const MARGIN = 8;

export function beside(anchor: () => HTMLElement): Attachment<HTMLElement> {
  return (tip) => {
    const at = anchor().getBoundingClientRect();
    const size = tip.getBoundingClientRect();
    const below = at.bottom + MARGIN + size.height <= innerHeight || at.top < size.height + MARGIN;
    const left = Math.max(MARGIN, Math.min(at.left, document.documentElement.clientWidth - size.width - MARGIN));
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? at.bottom + 4 : at.top - size.height - 4}px`;
  };
}
