/* The layout of a search tree: a column per step, a row for each hypothesis of the step, kept ones at the top. */

import type { Tree, Twig } from "./server";

const WIDE = 104; // pixels of a step
const HIGH = 24; // pixels of a row

export interface Placed extends Twig {
  x: number;
  y: number;
  fromX: number;
  fromY: number;
}

export function place(tree: Tree): { twigs: Placed[]; width: number; height: number } {
  const depth = new Map<number, number>();
  const steps: Twig[][] = [];
  for (const twig of tree.twigs) {
    const step = twig.parent === null ? 0 : depth.get(twig.parent)! + 1;
    depth.set(twig.id, step);
    (steps[step] ??= []).push(twig);
  }
  const placed = new Map<number, Placed>();
  steps.forEach((twigs, step) => {
    const dropped = (twig: Twig) => Number(!twig.kept && !twig.ended);
    [...twigs]
      .sort((one, other) => dropped(one) - dropped(other) || other.total - one.total)
      .forEach((twig, row) => {
        const parent = twig.parent === null ? null : placed.get(twig.parent)!;
        const [fromX, fromY] = parent ? [parent.x + labelWidth(parent), parent.y] : [4, HIGH / 2];
        placed.set(twig.id, { ...twig, x: 34 + step * WIDE, y: (row + 0.5) * HIGH, fromX, fromY });
      });
  });
  const tallest = Math.max(...steps.map((twigs) => twigs.length));
  return { twigs: [...placed.values()], width: steps.length * WIDE + 40, height: tallest * HIGH };
}

/** About as wide as a token and its probability are drawn. */
function labelWidth(twig: Twig): number {
  const letters = [...twig.token].reduce((sum, letter) => sum + (letter.codePointAt(0)! > 0x2e80 ? 13 : 8), 0);
  return Math.min(letters + 34, WIDE - 14);
}
