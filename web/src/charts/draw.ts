/** What uPlot does not draw by itself: healthy bands, the spread within buckets, marks for NaN and infinities. */

import uPlot from "uplot";
import type { Line } from "./lines";

/** Where an alert was raised. */
export interface AlertMark {
  x: number;
  severity: "warning" | "critical";
}

export interface Healthy {
  scale: string;
  low: number | null;
  high: number | null;
}

/** The healthy range as a faint ground, cut to the plot. */
export function drawBand(u: uPlot, band: Healthy, fill: string): void {
  const { left, top, width, height } = u.bbox;
  const scale = u.scales[band.scale];
  if (scale?.min == null || scale.max == null) return;
  const place = (value: number): number => u.valToPos(value, band.scale, true);
  const from = band.high === null || band.high >= scale.max ? top : Math.max(top, place(band.high));
  const to = band.low === null || band.low <= scale.min ? top + height : Math.min(top + height, place(band.low));
  if (to <= from) return;
  u.ctx.fillStyle = fill;
  u.ctx.fillRect(left, from, width, to - from);
}

/** Lowest to highest within each bucket, so that a spike of one iteration is seen from afar. */
export function drawSpread(u: uPlot, line: Line, scale: string, fill: string): void {
  const { ctx } = u;
  ctx.save();
  ctx.fillStyle = fill;
  ctx.globalAlpha = 0.22;
  ctx.beginPath();
  const edge = (column: (number | null)[], index: number): void => {
    const x = line.x[index];
    const y = column[index];
    if (x !== undefined && y != null) ctx.lineTo(u.valToPos(x, "x", true), u.valToPos(y, scale, true));
  };
  for (let index = 0; index < line.x.length; index++) edge(line.high, index);
  for (let index = line.x.length - 1; index >= 0; index--) edge(line.low, index);
  ctx.closePath();
  clipToPlot(u);
  ctx.fill();
  ctx.restore();
}

/** An abandoned segment's line: thin, pale, broken. */
export function drawGhost(u: uPlot, line: Line, scale: string, stroke: string, least: number): void {
  const { ctx } = u;
  ctx.save();
  clipToPlot(u);
  ctx.strokeStyle = stroke;
  ctx.globalAlpha = 0.5;
  ctx.lineWidth = uPlot.pxRatio;
  ctx.setLineDash([3 * uPlot.pxRatio, 3 * uPlot.pxRatio]);
  ctx.beginPath();
  let drawing = false;
  line.x.forEach((value, index) => {
    const y = line.y[index];
    if (y == null) {
      drawing = false;
      return;
    }
    const at = [u.valToPos(value, "x", true), u.valToPos(Math.max(y, least), scale, true)] as const;
    if (drawing) ctx.lineTo(...at);
    else ctx.moveTo(...at);
    drawing = true;
  });
  ctx.stroke();
  ctx.restore();
}

/** Small triangles at the upper edge where a value was NaN or infinite. */
export function drawNonfinite(u: uPlot, xs: number[], fill: string): void {
  const { ctx, bbox } = u;
  const size = 5 * uPlot.pxRatio;
  ctx.save();
  clipToPlot(u);
  ctx.fillStyle = fill;
  for (const value of xs) {
    const x = u.valToPos(value, "x", true);
    ctx.beginPath();
    ctx.moveTo(x - size, bbox.top);
    ctx.lineTo(x + size, bbox.top);
    ctx.lineTo(x, bbox.top + 1.5 * size);
    ctx.fill();
  }
  ctx.restore();
}

/** Triangles at the lower edge where an alert about these metrics was raised, a thin line above each. */
export function drawAlerts(u: uPlot, alerts: AlertMark[], fills: { warning: string; critical: string }): void {
  const { ctx, bbox } = u;
  const size = 4.5 * uPlot.pxRatio;
  const bottom = bbox.top + bbox.height;
  ctx.save();
  clipToPlot(u);
  for (const { x: iteration, severity } of alerts) {
    const x = u.valToPos(iteration, "x", true);
    ctx.fillStyle = fills[severity];
    ctx.globalAlpha = 0.35;
    ctx.fillRect(x - uPlot.pxRatio / 2, bbox.top, uPlot.pxRatio, bbox.height);
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.moveTo(x - size, bottom);
    ctx.lineTo(x + size, bottom);
    ctx.lineTo(x, bottom - 1.6 * size);
    ctx.fill();
  }
  ctx.restore();
}

function clipToPlot(u: uPlot): void {
  const { left, top, width, height } = u.bbox;
  const plot = new Path2D();
  plot.rect(left, top, width, height);
  u.ctx.clip(plot);
}
