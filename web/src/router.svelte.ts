/** Which page the address names. Links are plain links; clicks on them stay inside the page. */

export type Route =
  | { page: "runs" }
  | { page: "new" }
  | { page: "fleet" }
  | { page: "run"; id: string }
  | { page: "settings" }
  | { page: "login" }
  | { page: "missing" };

export function parseRoute(path: string): Route {
  const parts = path.split("/").filter(Boolean);
  if (parts.length === 0 || (parts.length === 1 && parts[0] === "runs")) return { page: "runs" };
  if (parts.length === 1 && parts[0] === "fleet") return { page: "fleet" };
  if (parts.length === 1 && parts[0] === "login") return { page: "login" };
  if (parts.length === 1 && parts[0] === "settings") return { page: "settings" };
  if (parts.length === 2 && parts[0] === "runs" && parts[1]) {
    return parts[1] === "new" ? { page: "new" } : { page: "run", id: decodeURIComponent(parts[1]) };
  }
  return { page: "missing" };
}

class Router {
  route = $state.raw<Route>(parseRoute(location.pathname));

  go(path: string, { replace = false } = {}): void {
    if (replace) history.replaceState(null, "", path);
    else history.pushState(null, "", path);
    this.#read();
    scrollTo(0, 0);
  }

  start(): void {
    addEventListener("popstate", () => this.#read());
    document.addEventListener("click", (click) => {
      if (click.defaultPrevented || click.button !== 0 || click.metaKey || click.ctrlKey || click.shiftKey) return;
      const link = click.target instanceof Element ? click.target.closest("a") : null;
      if (!link || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
      if (link.pathname.startsWith("/v1/") || link.hash) return;
      click.preventDefault();
      this.go(link.pathname + link.search);
    });
  }

  #read(): void {
    this.route = parseRoute(location.pathname);
  }
}

export const router = new Router();
