/** Parts of the pages load when they are first opened, which fails after the server was updated. */

import type { Problem } from "../api/types";

export const OUTDATED: Problem = {
  title: "This part of the page cannot be loaded",
  status: 0,
  detail: "The server is away, or it was updated since this tab was opened.",
};
