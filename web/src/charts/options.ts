/** How a panel looks as uPlot options. */

import uPlot from "uplot";
import { formatTick } from "../format";
import { colour } from "./colours";
import { drawAlerts, drawBand, drawGhost, drawNonfinite, drawSpread, type AlertMark, type Healthy } from "./draw";
import { spread, type Ghost, type Line } from "./lines";
import { metricsOf, type Panel } from "./panels";

/** On a logarithmic axis zero has no place; below this, values are drawn at it. */
export const LOG_FLOOR = 1e-8;
/** Lines beyond so many have the first ones' colours again, dashed. */
export const NUM_COLOURS = 4;
const FONT = "11px system-ui, sans-serif";

/** What the drawing asks for anew each time, since it changes under way. */
export interface Now {
  line(name: string): Line | undefined;
  shown(name: string): boolean;
  ghosts(): Ghost[];
  window(): [number, number];
  band(): Healthy | null;
  alerts(): AlertMark[];
  /** The reader dragged over a part, or asked for the whole again. */
  zoom(window: [number, number] | null): void;
  point(x: number | null): void;
}

export function scaleOf(panel: Panel, name: string): "y" | "right" {
  return panel.left.includes(name) ? "y" : "right";
}

function yRange(panel: Panel, scale: "y" | "right", now: Now): (u: uPlot) => uPlot.Range.MinMax {
  const names = (scale === "y" ? panel.left : panel.right) ?? [];
  const log = scale === "y" && panel.scale === "log";
  return () => {
    const lines = names
      .filter((name) => now.shown(name))
      .flatMap((name) => [now.line(name), ...now.ghosts().map((ghost) => ghost.lines.get(name))])
      .filter((line) => line !== undefined);
    const found = spread(lines, ...now.window());
    if (log) return uPlot.rangeLog(Math.max(found?.[0] ?? 1e-7, LOG_FLOOR), Math.max(found?.[1] ?? 1e-2, 10 * LOG_FLOOR), 10, true);
    if (!found) return [0, 1];
    const [low, high] = found;
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.5, high + Math.abs(high) * 0.5];
    const room = (high - low) * 0.09;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  };
}

function isPowerOfTen(value: number): boolean {
  return Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
}

/** An axis of one line has that line's colour, so that the eye finds which is whose. */
function axis(scale: "y" | "right", log: boolean, stroke: string, inUse: () => boolean): uPlot.Axis {
  const marks = (_: uPlot, splits: number[]): (number | null)[] => splits.map((value) => (log && !isPowerOfTen(value) ? null : value));
  return {
    scale,
    side: scale === "y" ? 3 : 1,
    stroke,
    font: FONT,
    size: 44,
    gap: 4,
    space: 30,
    ticks: { show: false },
    filter: marks,
    grid: { show: scale === "y", stroke: colour("grid"), width: 1, filter: marks },
    values: (_, splits) => splits.map((value) => (value === null || !inUse() ? "" : formatTick(value))),
  };
}

export function chartOptions(panel: Panel, size: { width: number; height: number }, syncKey: string, now: Now): uPlot.Options {
  const names = metricsOf(panel);
  const log = panel.scale === "log";
  const drawn = (some: string[]): boolean => some.some((name) => now.shown(name) && (now.line(name)?.x.length ?? 0) > 0);
  const colours = names.map((_, index) => colour(`series-${(index % NUM_COLOURS) + 1}`));
  const scales: uPlot.Scales = {
    x: { time: false, range: () => now.window() },
    y: { range: yRange(panel, "y", now), ...(log ? { distr: 3 as const, log: 10 as const } : {}) },
    ...(panel.right ? { right: { range: yRange(panel, "right", now) } } : {}),
  };
  return {
    ...size,
    scales,
    legend: { show: false },
    padding: [8, panel.right ? 0 : 14, 0, 0],
    cursor: {
      sync: { key: syncKey, setSeries: false, scales: ["x", null] },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      y: false,
      bind: { dblclick: () => () => (now.zoom(null), null) },
    },
    series: [
      {},
      ...names.map((name, index): uPlot.Series => {
        const stroke = colours[index] as string;
        return {
          scale: scaleOf(panel, name),
          stroke,
          width: 1.25,
          ...(index >= NUM_COLOURS ? { dash: [5, 3] } : {}),
          spanGaps: false,
          show: now.shown(name),
          points: { show: (u, at) => fewPoints(u, at), size: 5, fill: stroke, stroke },
        };
      }),
    ],
    axes: [
      { stroke: colour("muted"), font: FONT, size: 26, gap: 3, space: 56, ticks: { show: false }, grid: { show: false }, values: (_, splits) => splits.map(formatTick), incrs: [1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] },
      axis("y", log, panel.right && panel.left.length === 1 ? (colours[0] as string) : colour("muted"), () => drawn(panel.left)),
      ...(panel.right
        ? [axis("right", false, panel.right.length === 1 ? (colours.at(-1) as string) : colour("muted"), () => drawn(panel.right ?? []))]
        : []),
    ],
    hooks: {
      drawClear: [
        (u) => {
          const band = now.band();
          if (band) drawBand(u, band, colour("band"));
          names.forEach((name, index) => {
            const line = now.line(name);
            if (line && line.bucket > 1 && now.shown(name)) drawSpread(u, line, scaleOf(panel, name), colours[index] as string);
          });
          for (const { lines } of now.ghosts()) {
            names.forEach((name, index) => {
              const line = lines.get(name);
              const least = log && scaleOf(panel, name) === "y" ? LOG_FLOOR : -Infinity;
              if (line && now.shown(name)) drawGhost(u, line, scaleOf(panel, name), colours[index] as string, least);
            });
          }
        },
      ],
      draw: [
        (u) => drawNonfinite(u, names.flatMap((name) => (now.shown(name) ? (now.line(name)?.nonfinite ?? []) : [])), colour("bad")),
        (u) => drawAlerts(u, now.alerts(), { warning: colour("warn"), critical: colour("bad") }),
      ],
      setSelect: [
        (u) => {
          if (u.select.width < 4) return;
          const from = u.posToVal(u.select.left, "x");
          const to = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (to - from >= 1) now.zoom([Math.round(from), Math.round(to)]);
        },
      ],
      setCursor: [(u) => now.point(u.cursor.idx == null ? null : (u.data[0][u.cursor.idx] ?? null))],
    },
  };
}

/** Lines of few points, such as evaluations, show each of them. */
function fewPoints(u: uPlot, series: number): boolean {
  let count = 0;
  for (const value of u.data[series] ?? []) if (value != null && ++count > 24) return false;
  return count <= 2 || (u.data[0].length > 3 * count && count <= 24);
}
