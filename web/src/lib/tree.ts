/* The layout of a search tree: a column per step, as wide as its widest label, and a row for each hypothesis of the step,
   kept ones at the top. */

import type { Tree, TreeNode } from "./server";

const GAP = 40; // pixels between the label of a step and the next
const HIGH = 24; // pixels of a row

export interface Placed extends TreeNode {
  x: number;
  y: number;
  fromX: number;
  fromY: number;
}

export function place(tree: Tree): { nodes: Placed[]; width: number; height: number } {
  const depth = new Map<number, number>();
  const steps: TreeNode[][] = [];
  for (const node of tree.nodes) {
    const step = node.parent === null ? 0 : depth.get(node.parent)! + 1;
    depth.set(node.id, step);
    (steps[step] ??= []).push(node);
  }
  const placed = new Map<number, Placed>();
  let x = 34;
  for (const nodes of steps) {
    const dropped = (node: TreeNode) => Number(!node.kept && !node.ended);
    [...nodes]
      .sort((one, other) => dropped(one) - dropped(other) || other.total - one.total)
      .forEach((node, row) => {
        const parent = node.parent === null ? null : placed.get(node.parent)!;
        const [fromX, fromY] = parent ? [parent.x + labelWidth(parent), parent.y] : [4, HIGH / 2];
        placed.set(node.id, { ...node, x, y: (row + 0.5) * HIGH, fromX, fromY });
      });
    x += GAP + Math.max(...nodes.map(labelWidth));
  }
  const tallest = Math.max(...steps.map((nodes) => nodes.length));
  return { nodes: [...placed.values()], width: x, height: tallest * HIGH };
}

/** At least as wide as a token and its probability are drawn. */
function labelWidth(node: TreeNode): number {
  const letters = [...node.token].reduce((sum, letter) => sum + (letter.codePointAt(0)! > 0x2e80 ? 14 : 8.4), 0);
  return letters + 43;
}
