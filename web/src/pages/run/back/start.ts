/** What a dialog of going back begins with. */

import type { SettingRow } from "./settings";

export interface Start {
  /** Null: the one that is suggested. */
  checkpoint: string | null;
  rows: SettingRow[];
  reason?: string;
}
