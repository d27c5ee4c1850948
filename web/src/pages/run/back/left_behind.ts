/** What a roll back leaves behind, as a sentence. */

import type { RollbackPreview } from "../../../api/types";

export function leftBehindWords(left: RollbackPreview["left_behind"]): string {
  if (!left || left.to_iteration < left.from_iteration) return "Nothing: the run stands at this checkpoint.";
  const one = left.to_iteration === left.from_iteration;
  const iterations = one ? `Iteration ${left.from_iteration}` : `Iterations ${left.from_iteration} to ${left.to_iteration}`;
  const saved = left.checkpoints === 0 ? "" : left.checkpoints === 1 ? " and a checkpoint" : ` and ${left.checkpoints} checkpoints`;
  return `${iterations} of segment ${left.segment}${saved}. Nothing is deleted: they stay, dimmed, and one can go back to them.`;
}
