/** A kept response's tokens: which values were recorded for them, and how strongly each is coloured. No drawing. */

import type { TokenRecord } from "../../api/types";

export type Column = "advantages" | "kl" | "rewards" | "values" | "returns" | "logprobs" | "ref_logprobs";

export const COLUMNS: { id: Column; title: string; meaning: string }[] = [
  { id: "advantages", title: "Advantage", meaning: "how much better than expected; what the update pushes" },
  { id: "kl", title: "KL", meaning: "log-probability above the reference's; what the penalty pulls back" },
  { id: "rewards", title: "Reward", meaning: "KL penalty on every token, score on the last" },
  { id: "values", title: "Value", meaning: "the critic's estimate before the token" },
  { id: "returns", title: "Return", meaning: "advantage plus value" },
  { id: "logprobs", title: "Logprob", meaning: "log-probability under the policy that wrote it" },
  { id: "ref_logprobs", title: "Reference logprob", meaning: "log-probability under the reference" },
];

type Numbers = (number | null)[];

export function recorded(record: TokenRecord): typeof COLUMNS {
  return COLUMNS.filter(({ id }) => record[id]?.some((value) => value !== null));
}

/** -1 to 1 for each token: its value over the largest of the response. */
export function strengths(values: Numbers): number[] {
  const largest = Math.max(...values.map((value) => Math.abs(value ?? 0)));
  return values.map((value) => (largest > 0 ? (value ?? 0) / largest : 0));
}

/** The token's text with its white space made visible where it stands alone or breaks the line. */
export function visible(text: string): string {
  const shown = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍");
  return shown.trim() === "" ? shown.replace(/ /g, "␣") || "∅" : shown;
}
