/* Names of the rows of a map over the layers of a stack. */

import { say } from "./words.svelte";

/** The embeddings, then every layer: "Embeddings", "Layer 0", … */
export function layerRows(count: number): string[] {
  return Array.from({ length: count }, (_, index) => (index ? `${say("layer")} ${index - 1}` : say("embeddingRow")));
}

/** The largest absolute value of a table. */
export function farthest(values: (number | null)[][]): number {
  return values.flat().reduce<number>((most, value) => Math.max(most, Math.abs(value ?? 0)), 1e-9);
}

/** A number in a cell, with two decimals; what rounds to zero is 0. */
export function inCell(value: number): string {
  return Math.abs(value) < 0.005 ? "0" : value.toFixed(2).replace("-", "−");
}
