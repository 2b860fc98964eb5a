/* The stages of one query, from the values that the server sent. */

import type { Steps } from "./server";

export class Stages {
  readonly q: Float32Array;
  readonly scores: Float32Array;
  readonly scaled: Float32Array;
  readonly masked: Float32Array;
  readonly weights: Float32Array;
  readonly output: Float32Array;
  readonly scale: number;
  readonly #k: Float32Array;
  readonly #v: Float32Array;
  readonly #wide: number; // size of a value

  constructor(steps: Steps) {
    const get = (name: string) => steps.blocks.get(name)!.values as Float32Array;
    [this.q, this.#k, this.#v] = [get("q"), get("k"), get("v")];
    [this.scores, this.scaled, this.masked] = [get("scores"), get("scaled"), get("masked")];
    [this.weights, this.output] = [get("weights"), get("output")];
    this.scale = steps.scale;
    this.#wide = steps.blocks.get("v")!.shape[1];
  }

  /** The position encoding adds a bias to the scaled scores. */
  get biased(): boolean {
    return this.scores.some((score, key) => Math.abs(score * this.scale - this.scaled[key]) > 1e-3);
  }

  /** An additive score (Bahdanau et al. 2015) is not a dot product, so there are no elementwise products to show. */
  get dotted(): boolean {
    if (this.#k.length !== this.scores.length * this.q.length) return false;
    const sum = this.q.reduce((total, value, index) => total + value * this.#k[index], 0);
    return Math.abs(sum - this.scores[0]) <= 1e-3 * (1 + Math.abs(this.scores[0]));
  }

  get largestProduct(): number {
    let most = 0;
    for (let i = 0; i < this.#k.length; i++) most = Math.max(most, Math.abs(this.#k[i] * this.q[i % this.q.length]));
    return most;
  }

  get largestValue(): number {
    return peak(this.#v);
  }

  /** q × k, elementwise: the sum is the score. */
  product(key: number): Float32Array {
    const { length } = this.q;
    return this.#k.subarray(key * length, (key + 1) * length).map((value, index) => value * this.q[index]);
  }

  /** weight × v of one key. */
  weighted(key: number, weight: number): Float32Array {
    return this.#v.subarray(key * this.#wide, (key + 1) * this.#wide).map((value) => value * weight);
  }

  /** The output of the head with these weights. */
  sum(weights: ArrayLike<number>): Float32Array {
    const total = new Float32Array(this.#wide);
    for (let i = 0; i < this.#v.length; i++) total[i % this.#wide] += this.#v[i] * weights[Math.floor(i / this.#wide)];
    return total;
  }

  /** Set one weight; the others are rescaled so that the row still sums to 1. */
  rebalance(weights: ArrayLike<number>, key: number, wanted: number): number[] {
    const weightOfKey = Math.min(Math.max(wanted, 0), 1);
    const seen = Array.from(this.masked, (score, index) => index !== key && score !== -Infinity);
    const others = seen.filter(Boolean).length;
    const rest = Array.from(weights).reduce((sum, weight, index) => sum + (index === key ? 0 : weight), 0);
    return Array.from(weights, (weight, index) => {
      if (index === key) return others ? weightOfKey : 1;
      if (rest > 0) return (weight * (1 - weightOfKey)) / rest;
      return seen[index] ? (1 - weightOfKey) / others : 0; // it had all the weight: the others start equal
    });
  }
}

export function peak(values: Float32Array): number {
  let most = 0;
  for (const value of values) most = Math.max(most, Math.abs(value));
  return most;
}
