/* Beam search, by the rules of `regard.predict.beam`; a beam of 1 is greedy search.

   Of the 2 · beam best extensions, those that end among the first `beam` are finished and ranked by
   log P / ((5 + length) / 6)^length_penalty; the search ends when no live one can pass the worst of `beam` finished. */

import { type Decoding, type Weights, best, ids, logProbabilities, weightsOf } from "./graph";

export interface Rules {
  beam: number;
  length_penalty: number;
  min_length: number;
  limit: number;
  begin: number;
  end: number;
  size: number; // of the vocabulary
}

export interface Hypothesis {
  tokens: number[];
  total: number;
  score: number;
  weights: Weights[]; // of each step
}

export async function search(decoding: Decoding, rules: Rules): Promise<Hypothesis> {
  const { beam, end, limit } = rules;
  const penalty = (length: number) => ((5 + length) / 6) ** rules.length_penalty;
  let live: Hypothesis[] = [{ tokens: [], total: 0, score: 0, weights: [] }];
  let finished: Hypothesis[] = [];
  for (let length = 1; ; length++) {
    const read = live.map(({ tokens }) => [tokens.at(-1) ?? rules.begin]);
    const output = await decoding.step("input_ids", ids(read));
    const candidates = live.flatMap((one, row) => {
      const log = logProbabilities(output.logits, rules.size, row);
      if (length <= rules.min_length) log[end] = -Infinity;
      return best(log, 2 * beam).map((token) => ({ row, token, total: one.total + log[token] }));
    });
    candidates.sort((one, other) => other.total - one.total); // stable: of equal ones the earlier beam stays in front
    const shown = live.map((_, row) => weightsOf(output, row));
    const extend = ({ row, token, total }: (typeof candidates)[number]): Hypothesis => ({
      tokens: token === end ? live[row].tokens : [...live[row].tokens, token],
      total,
      score: total / penalty(length),
      weights: [...live[row].weights, shown[row]],
    });
    for (const one of candidates.slice(0, beam))
      if ((one.token === end || length === limit) && one.total > -Infinity) finished.push(extend(one));
    finished = finished.sort((one, other) => other.score - one.score).slice(0, beam);
    const next = candidates.slice(0, 2 * beam).filter(({ token, total }) => token !== end && total > -Infinity).slice(0, beam);
    const highest = next.length ? next[0].total / penalty(rules.length_penalty >= 0 ? limit : length + 1) : -Infinity;
    const settled = finished.length === beam && (beam === 1 || highest <= finished[beam - 1].score);
    if (length === limit || !next.length || settled) return finished[0];
    decoding.reorder(next.map(({ row }) => row));
    live = next.map(extend);
  }
}
