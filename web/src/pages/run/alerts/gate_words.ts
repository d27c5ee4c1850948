/** What a judge gate found, in words. */

import type { Gate, GateWins } from "../../../api/types";
import { formatNumber, MISSING } from "../../../format";

/** A win rate in whole percent. */
export function shareText(rate: number | null): string {
  return rate === null ? MISSING : `${Math.round(rate * 100)} %`;
}

export function winsWords(wins: GateWins): string {
  return `${wins.wins} won, ${wins.ties} tied, ${wins.losses} lost`;
}

/** How a judge that compares could be asked; empty for one that scores. */
export function askedWords(wins: GateWins): string {
  if (wins.asked === null) return "";
  const words = [`${wins.asked} pairs asked about in both orders`];
  if (wins.swayed) words.push(`${wins.swayed} decided by their place, so tied`);
  if (wins.unreadable) words.push(`${wins.unreadable} answers that could not be read, so tied`);
  return words.join("; ");
}

/** What a judge that compares said of one answer. */
export function preferenceWords(preference: number): string {
  return preference > 0 ? "preferred" : preference < 0 ? "not preferred" : "tied";
}

export function riseWords(rise: Gate["rise"]): string {
  if (rise.mean === null || rise.standard_error === null) return MISSING;
  const sign = rise.mean > 0 ? "+" : "";
  return `${sign}${formatNumber(rise.mean)} ± ${formatNumber(2 * rise.standard_error)}`;
}
