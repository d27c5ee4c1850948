/** Which part of the run page's lower half is open; the address keeps it, so that a link opens it again. */

export const TABS = ["samples", "alerts", "checkpoints", "lineage", "metrics", "events", "logs", "spec"] as const;
export type Tab = (typeof TABS)[number];

class PageTab {
  shown = $state<Tab>(fromAddress());
  /** The entry to bring into sight, such as a checkpoint's id. */
  target = $state<string | null>(null);

  open(tab: Tab, target: string | null = null): void {
    this.shown = tab;
    this.target = target;
    history.replaceState(null, "", tab === "samples" ? location.pathname : `${location.pathname}?tab=${tab}`);
  }

  /** Another run's page was opened. */
  read(): void {
    this.shown = fromAddress();
    this.target = null;
  }
}

function fromAddress(): Tab {
  const named = new URLSearchParams(location.search).get("tab");
  return TABS.find((tab) => tab === named) ?? "samples";
}

export const pageTab = new PageTab();
