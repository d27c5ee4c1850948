// Runs before the first paint, so that a chosen theme does not flash. It is a file of its own because the
// content-security policy allows no inline script.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is switched off: the system's theme holds.
}
