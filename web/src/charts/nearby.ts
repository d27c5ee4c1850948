/** Tells whether an element is on the screen, or less than half a screen away from it. */

import type { Attachment } from "svelte/attachments";

export function nearby(tell: (near: boolean) => void): Attachment<HTMLElement> {
  return (element) => {
    const watch = new IntersectionObserver((entries) => tell(entries.at(-1)?.isIntersecting ?? false), { rootMargin: "50% 0px" });
    watch.observe(element);
    return () => watch.disconnect();
  };
}
