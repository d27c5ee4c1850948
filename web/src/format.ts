/** Numbers, sizes, spans and times as people read them. */

export const MISSING = "–";

const NONFINITE: Record<string, string> = { NaN: "NaN", Infinity: "+∞", "-Infinity": "−∞" };

/** Four significant digits at most; very large and very small numbers with an exponent. */
export function formatNumber(value: number | null | undefined, nonfinite?: string | null): string {
  if (nonfinite) return NONFINITE[nonfinite] ?? nonfinite;
  if (value === null || value === undefined) return MISSING;
  if (!Number.isFinite(value)) return NONFINITE[String(value)] ?? String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text: string;
  if (size < 1e-3 || size >= 1e7) text = value.toExponential(2).replace("e+", "e");
  else if (Number.isInteger(value)) text = group(String(value));
  else if (size >= 1000) text = group(value.toFixed(0));
  else text = value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  return text.replace("-", "−").replace(/e−/, "e−");
}

/** A number at an axis: as short as it can be said. */
export function formatTick(value: number): string {
  const size = Math.abs(value);
  const rounded = Number(value.toPrecision(6));
  const text = size !== 0 && (size < 1e-4 || size >= 1e6) ? rounded.toExponential().replace("e+", "e") : String(rounded);
  return text.replace(/-/g, "−");
}

function group(digits: string): string {
  return digits.replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function formatCount(value: number): string {
  return group(String(Math.round(value)));
}

export function formatBytes(bytes: number): string {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${unit === "B" ? value : value.toFixed(value < 10 ? 1 : 0)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

/** `45 s`, `6 min 12 s`, `6 h 12 min`, `3 d 4 h`. */
export function formatSpan(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return pair(whole, 60, "min", "s", 1);
  if (whole < 86_400) return pair(whole, 3600, "h", "min", 60);
  return pair(whole, 86_400, "d", "h", 3600);
}

function pair(seconds: number, unit: number, name: string, restName: string, restUnit: number): string {
  const rest = Math.floor((seconds % unit) / restUnit);
  return `${Math.floor(seconds / unit)} ${name}${rest ? ` ${rest} ${restName}` : ""}`;
}

export function formatAgo(time: string, now: number): string {
  const seconds = (now - Date.parse(time)) / 1000;
  return seconds < 5 ? "just now" : `${formatSpan(seconds < 3600 ? seconds : Math.floor(seconds / 60) * 60)} ago`;
}

/** Date and time in the reader's own zone. */
export function formatTime(time: string): string {
  const date = new Date(time);
  const two = (value: number): string => String(value).padStart(2, "0");
  return (
    `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`
  );
}

/** Log text without terminal escape sequences and other control characters; tabs and line ends stay. */
export function plainText(text: string): string {
  return text
    .replace(/\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-_]/g, "")
    .replace(/\r+\n/g, "\n")
    .replace(/[^\n]*\r(?!\n)/g, "")
    .replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g, "\ufffd");
}
