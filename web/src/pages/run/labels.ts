/** A run's name, notes and priority as a form has them. */

import type { RunLabels } from "../../api/types";

/** A form's fields; `priority` is null while what stands in it is no number. */
export interface Filled {
  name: string;
  notes: string;
  priority: number | null;
}

/** The fields that differ from what was seen; empty notes are none. */
export function changesOf(seen: RunLabels, filled: Filled): Partial<RunLabels> {
  const changes: Partial<RunLabels> = {};
  const name = filled.name.trim();
  const notes = filled.notes.trim() || null;
  if (name && name !== seen.name) changes.name = name;
  if (notes !== seen.notes) changes.notes = notes;
  if (filled.priority !== null && filled.priority !== seen.priority) changes.priority = filled.priority;
  return changes;
}
