/* Numbers about maps: the distance between two, and how far and how widely a head attends. */

import { blockName, ONE, type Look, type HeadMap, type Part } from "./look";

/** The fraction of attention that each head has moved, 0 to 1: half of Σ |after - before|, mean of the queries. */
export function shift(before: Look | null, after: Look | null, parts: Part[]): Map<string, number> {
  const found = new Map<string, number>();
  if (!before || !after) return found;
  for (const part of parts) {
    const [old, now] = [before.blocks.get(blockName(part)), after.blocks.get(blockName(part))];
    if (!part.whole || !old || !now || old.values.length !== now.values.length) continue;
    const [heads, rows, columns] = now.shape;
    for (let head = 0; head < heads; head++) {
      let sum = 0;
      const end = (head + 1) * rows * columns;
      for (let at = head * rows * columns; at < end; at++) sum += Math.abs(now.values[at] - old.values[at]);
      const moved = sum / (2 * ONE * rows);
      if (moved > 0.001) found.set(`${part.layer} ${head}`, moved);
    }
  }
  return found;
}

/** A bar: the positions `from` to `to`, and the fraction of the attention that goes there. */
export interface Bin {
  from: number;
  to: number;
  weight: number;
}

export const SINGLE = 40; // farther distances share a bar: 41 to 64, 65 to 128, 129 to 256, …

/** The fraction of the attention that goes so far, key minus query: Σ of the weights there / queries. Over all bins it
    sums to 1; a mean over the pairs would make much of the few that are farthest apart. `future`: also later keys. */
export function byDistance(map: HeadMap, future = true): Bin[] {
  const farthest = Math.max(map.rows, map.columns) - 1;
  const ends = Array.from({ length: Math.min(SINGLE, farthest) + 1 }, (_, distance) => distance);
  for (let end = 64; ends[ends.length - 1] < farthest; end *= 2) ends.push(Math.min(end, farthest));
  const bins: Bin[] = ends.map((to, at) => ({ from: at ? ends[at - 1] + 1 : 0, to, weight: 0 }));
  const back = bins.slice(1).map(({ from, to }) => ({ from: -to, to: -from, weight: 0 }));
  const binOf = new Int32Array(farthest + 1);
  bins.forEach(({ from, to }, at) => binOf.fill(at, from, to + 1));
  for (let row = 0; row < map.rows; row++)
    for (let column = 0; column < map.columns; column++) {
      const distance = column - row;
      const bin = binOf[Math.abs(distance)];
      (distance < 0 ? back[bin - 1] : bins[bin]).weight += map.values[row * map.columns + column] / map.rows / ONE;
    }
  return [...back.reverse(), ...bins.slice(0, future ? undefined : 1)];
}

/** Mean weight of each key; of many keys, neighbours share a bar. */
export function byKey(map: HeadMap, most = 160): Bin[] {
  const wide = Math.ceil(map.columns / most);
  const bins = Array.from({ length: Math.ceil(map.columns / wide) }, (_, at) => {
    return { from: at * wide, to: Math.min((at + 1) * wide, map.columns) - 1, weight: 0 };
  });
  for (let at = 0; at < map.values.length; at++)
    bins[Math.floor((at % map.columns) / wide)].weight += map.values[at] / map.rows / ONE;
  return bins;
}

/** The name of a bin of distances: −3, or 41 to 64 as +41…64. */
export function binName({ from, to }: Bin): string {
  const sign = from > 0 ? "+" : to < 0 ? "−" : "";
  const [near, far] = [Math.min(Math.abs(from), Math.abs(to)), Math.max(Math.abs(from), Math.abs(to))];
  return near === far ? `${sign}${near}` : `${sign}${near}…${far}`;
}

/** exp of the mean entropy of the rows: the effective number of keys. */
export function spread(map: HeadMap): number {
  let total = 0;
  for (let row = 0; row < map.rows; row++) {
    let entropy = 0;
    for (let at = row * map.columns; at < (row + 1) * map.columns; at++) {
      const weight = map.values[at] / ONE;
      if (weight > 0) entropy -= weight * Math.log(weight);
    }
    total += entropy;
  }
  return Math.exp(total / Math.max(1, map.rows));
}
