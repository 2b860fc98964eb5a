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

/** The fraction of the attention that goes so far, key minus query: [distance, Σ of the weights there / queries]. Over all
    distances it sums to 1; a mean over the pairs would make much of the few that are farthest apart. */
export function byDistance(map: HeadMap, farthest: number): [number, number][] {
  const sums = new Float64Array(2 * farthest + 1);
  for (let row = 0; row < map.rows; row++)
    for (let column = 0; column < map.columns; column++) {
      const distance = column - row;
      if (Math.abs(distance) > farthest) continue;
      sums[distance + farthest] += map.values[row * map.columns + column];
    }
  return Array.from(sums, (sum, at) => [at - farthest, sum / map.rows / ONE]);
}

/** Mean weight of each key. */
export function byKey(map: HeadMap): [number, number][] {
  const sums = new Float64Array(map.columns);
  for (let at = 0; at < map.values.length; at++) sums[at % map.columns] += map.values[at];
  return Array.from(sums, (sum, key) => [key, sum / map.rows / ONE]);
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
