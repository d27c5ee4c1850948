/** The token in a one-time link, in its fragment, or by itself. */

export function tokenOf(text: string): string | null {
  const trimmed = text.trim();
  const fragment = /(?:^|#)token=([^&\s]+)/.exec(trimmed);
  if (fragment?.[1]) return decodeURIComponent(fragment[1]);
  return /^[\w.~-]{8,}$/.test(trimmed) ? trimmed : null;
}
