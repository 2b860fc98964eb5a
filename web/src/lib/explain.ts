/* The arithmetic of one box of the picture: formulas, vectors and numbers of the selected token. */

import { length, vector, type Box, type Flow, type Kind } from "./flow";
import { number, positionTitle } from "./titles";
import { say, type Word } from "./words.svelte";

export type Row =
  | { kind: "formula"; text: string }
  | { kind: "vector"; label: string; values: Float32Array }
  | { kind: "fact"; label: string; value: string }
  | { kind: "table"; heads: string[]; rows: string[][]; bars: number[] };

const ACTIVATIONS: Record<string, string> = {
  relu: "ReLU(h) = max(0, h)",
  gelu: "GELU(h) = h · Φ(h)",
  "gelu-tanh": "GELU(h) ≈ h/2 · (1 + tanh(√(2/π) (h + 0.0447 h³)))",
  silu: "SiLU(h) = h · σ(h)",
};
const GATED: Record<string, string> = {
  swiglu: "SwiGLU(h) = SiLU(W_g x) ⊙ W_u x",
  geglu: "GEGLU(h) = GELU(W_g x) ⊙ W_u x",
};
/** Scores that are not the dot product: of a Transformer, and of a recurrent model, which projects q and k first. */
const SCORES: Record<string, string> = { multiplicative: "q · W k", additive: "aᵀ tanh(U q + W k)", concat: "aᵀ tanh(W [q; k])" };
const NAMES: Record<string, string> = { relu: "ReLU", silu: "SiLU", swiglu: "SwiGLU", geglu: "GEGLU" };

/** The name of an activation function. */
export function activationName(name: string): string {
  return NAMES[name] ?? "GELU";
}

export function bytes(count: number): string {
  if (count < 1000) return `${count} B`;
  const [unit, size] = count < 1e6 ? ["kB", 1e3] : count < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  return `${(count / size).toFixed(count / size < 10 ? 2 : 1)} ${unit}`;
}

export function shapeOf(flow: Flow, box: Box): string {
  const shape = box.stage ? flow.shapes[box.stage] : null;
  return shape ? shape.join(" × ") : "";
}

/** Positions that a layer's cache holds when the selected token is read. */
export function cached(flow: Flow, box: Box): number {
  const read = (flow.at[box.stack.name] ?? 0) + 1;
  const { reach } = box.stack.layers[box.layer ?? 0];
  return reach === null ? read : Math.min(read, reach);
}

/** What the functions below write: the rows of one box. */
class Explanation {
  rows: Row[] = [];
  readonly path: string;
  readonly at: number;

  constructor(
    readonly flow: Flow,
    readonly box: Box,
    readonly labels: string[],
    readonly keys: string[],
  ) {
    this.path = `${box.stack.name}.${box.layer}.${box.part}`;
    this.at = flow.at[box.stack.name] ?? 0;
  }

  formula(text: string): void {
    this.rows.push({ kind: "formula", text });
  }

  fact(label: Word, value: string | number): void {
    this.rows.push({ kind: "fact", label: say(label), value: String(value) });
  }

  /** The vector of an activation; by default that of the box. */
  show(label: string, stage: string | null = this.box.stage): void {
    const values = vector(this.flow, stage);
    if (values) this.rows.push({ kind: "vector", label, values });
  }
}

const EXPLAIN: Partial<Record<Kind, (e: Explanation) => void>> = {
  token(e) {
    e.fact("token", e.labels[e.at] ?? "");
    e.fact("position", e.at);
  },
  embedding(e) {
    const { input, embed_scale: scale, types, cls } = e.box.stack;
    const token = scale === 1 ? "E[id]" : `E[id] · √d = E[id] · ${number(scale, 2)}`;
    if (cls && e.at === 0) e.formula("x = [CLS]");
    else e.formula(input !== "tokens" ? "x = W · v + b" : `x = ${token}${types ? " + T[0]" : ""}`);
    e.show("x");
  },
  position(e) {
    const { name, position } = e.box.stack;
    e.formula(position === "learned" ? `P[${e.at}]` : "PE(pos, 2i) = sin(pos / 10000^(2i/d))\nPE(pos, 2i+1) = cos(pos / 10000^(2i/d))");
    e.fact("position", vector(e.flow, `${name}.positions`)?.[e.at] ?? e.at);
    e.show("p");
  },
  add: explainSum,
  norm: explainNorm,
  q: explainProjection,
  k: explainProjection,
  v: explainProjection,
  cache(e) {
    const { layers, key_dim } = e.box.stack;
    const info = layers[e.box.layer ?? 0];
    const count = cached(e.flow, e.box);
    e.formula(`2 · ${info.kv_heads} · ${key_dim} · ${count} · ${info.cache / (2 * info.kv_heads * key_dim)} B`);
    e.fact("flowCached", say("factTokens", count));
    e.fact("flowCacheLayer", bytes(info.cache * count));
    e.fact("flowCacheAll", bytes(layers.reduce((sum, one) => sum + one.cache * Math.min(e.at + 1, one.reach ?? e.at + 1), 0)));
  },
  head: explainHead,
  project(e) {
    e.formula(`W_o [head 0; head 1; …]${e.box.stack.bias ? " + b" : ""}`);
    e.show("heads", `${e.path}.heads`);
    e.show("f(x)");
  },
  up(e) {
    const { activation, bias } = e.box.stack;
    e.formula(`h = ${activation in GATED ? "[W_g x; W_u x]" : "W₁ x"}${bias ? " + b₁" : ""}`);
    e.fact("flowWider", `${e.box.stack.dim} → ${e.flow.shapes[e.box.stage!]?.[1]}`);
    e.show("h");
  },
  activation: explainActivation,
  down(e) {
    e.formula(`f(x) = W₂ ${activationName(e.box.stack.activation)}${e.box.stack.bias ? " + b₂" : ""}`);
    e.show("f(x)");
  },
  experts(e) {
    const router = vector(e.flow, `${e.path}.router`);
    if (router) table(e.rows, [say("flowExpert"), "p"], [...router].map((p, index) => [String(index), number(p)]), [...router]);
    e.show("f(x)");
  },
  logits(e) {
    const { tied, head, head_layer, bias, scale, size, best } = e.flow.output;
    const x = head_layer ? "LayerNorm(GELU(W′ x + b′))" : "x";
    e.formula(`logits = W ${x}${scale === 1 ? "" : ` · ${number(scale)}`}${bias ? " + b" : ""}${tied && head === "tokens" ? ",  W = E" : ""}`);
    e.fact("flowOutputs", (size ?? 0).toLocaleString("en"));
    table(e.rows, [say(head === "classes" ? "flowClass" : "token"), "logit"], best.map((one) => [one.label, number(one.logit, 2)]), []);
  },
  softmax: explainSoftmax,
  values(e) {
    const { values = [] } = e.flow.output;
    e.formula("y = W x + b,  y · σ + μ");
    [...(vector(e.flow, "values") ?? [])].forEach((y, index) => {
      e.rows.push({ kind: "fact", label: values.length > 1 ? `y[${index}]` : "y", value: number(y) });
      e.rows.push({ kind: "fact", label: "y · σ + μ", value: number(values[index]) });
    });
  },
  pooled(e) {
    const x = e.flow.output.pooling === "mean" ? "Σ x_i / N" : "x_0";
    e.formula(`x̄ = ${e.flow.output.pooler ? `tanh(W (${x}) + b)` : x}`);
    e.show("x̄");
  },
  cell(e) {
    const [cell, first] = [e.box.stack.cell.toUpperCase(), e.box.stack.name === "encoder"];
    e.formula(first ? `h→_i = ${cell}(x_i, h→_i−1)\nh←_i = ${cell}(x_i, h←_i+1)` : `s_i = ${cell}([x_i; c_i], s_i−1)`);
    e.show(first ? "[h→; h←]" : "s");
  },
  readout(e) {
    e.formula("t = max of pairs in W [s; c; x]");
    e.show("t");
  },
};

export function explain(flow: Flow, box: Box, labels: string[], keys: string[]): Row[] {
  const made = new Explanation(flow, box, labels, keys);
  const write = EXPLAIN[box.kind];
  if (write) write(made);
  else made.show("x");
  return made.rows;
}

function explainSum(e: Explanation): void {
  const { name, residual } = e.box.stack;
  if (e.box.part === null) {
    e.formula("x + p");
    e.show("x", `${name}.embedding`);
    e.show("p", `${name}.position_encoding`);
    e.show("x + p", `${name}.embedded`);
    return;
  }
  e.formula(residual ? "x ← x + f(x)" : "x ← f(x)");
  e.show("x", `${e.path}.before`);
  e.show("f(x)", `${e.path}.output`);
  e.show(residual ? "x + f(x)" : "f(x)", `${e.path}.sum`);
}

/** q, k or v: one vector per head. */
function explainProjection(e: Explanation): void {
  const { kind, part, stack, stage } = e.box;
  const rotated = stack.position === "rope" && kind !== "v" && part !== "cross";
  const product = `W_${kind} ${part === "cross" && kind !== "q" ? "m" : "x"}${stack.bias ? " + b" : ""}`;
  const made = stack.kind === "recurrent" ? recurrentPart(stack, kind) : stack.qk_norm && kind !== "v" ? `RMSNorm(${product})` : product;
  e.formula(`${kind} = ${made}${rotated ? `,  ${say("flowRotated", e.at)}` : ""}`);
  const block = e.flow.blocks.get(`v:${stage}`);
  if (!block) return;
  const size = block.values.length / block.shape[0];
  for (let head = 0; head < Math.min(block.shape[0], 16); head++) {
    const values = (block.values as Float32Array).subarray(head * size, (head + 1) * size);
    e.rows.push({ kind: "vector", label: `${kind} · ${head}`, values });
  }
}

/** q, k and v of a recurrent model: s is the state of the decoder before this step, h the encoder's output. */
function recurrentPart({ score }: Box["stack"], kind: Kind): string {
  if (kind === "q") return score === "additive" ? "U s" : "s";
  return kind === "v" ? "h" : score === "dot" ? "h→ + h←" : "W h";
}

function explainActivation(e: Explanation): void {
  const { activation } = e.box.stack;
  const values = vector(e.flow, e.box.stage);
  e.formula(ACTIVATIONS[activation] ?? GATED[activation]);
  if (!values) return;
  e.fact("flowActive", `${values.filter((value) => value > 0).length} / ${values.length}`);
  const best = [...values.keys()].sort((one, other) => Math.abs(values[other]) - Math.abs(values[one])).slice(0, 5);
  const most = Math.abs(values[best[0]]) || 1;
  const cells = best.map((unit) => [String(unit), number(values[unit], 2)]);
  table(e.rows, [say("flowUnit"), say("flowValue")], cells, best.map((unit) => Math.abs(values[unit]) / most));
  e.show("h", `${e.path}.up`);
  e.show(activationName(activation));
}

function table(rows: Row[], heads: string[], cells: string[][], bars: number[]): void {
  rows.push({ kind: "table", heads, rows: cells, bars });
}

/** The vector that a norm reads. */
function normInput(flow: Flow, box: Box, path: string): Float32Array | null {
  const { stack } = box;
  if (box.part !== null) return vector(flow, `${path}.${stack.norm_order === "pre" ? "before" : "sum"}`);
  if (box.stage === `${stack.name}.output`) return vector(flow, `${stack.name}.${stack.layers.length - 1}.output`);
  const [x, p] = [vector(flow, `${stack.name}.embedding`), vector(flow, `${stack.name}.position_encoding`)];
  return x && p ? x.map((value, index) => value + p[index]) : x;
}

function explainNorm({ flow, box, rows, path }: Explanation): void {
  const { stack } = box;
  const [x, y] = [normInput(flow, box, path), vector(flow, box.stage)];
  if (!x || !y) return;
  const gain = flow.blocks.get(`p:${box.stage}.gain`)?.values;
  const bias = flow.blocks.get(`p:${box.stage}.bias`)?.values;
  const layer = stack.norm === "layer";
  const mean = layer ? x.reduce((sum, value) => sum + value, 0) / x.length : 0;
  const deviation = Math.sqrt(x.reduce((sum, value) => sum + (value - mean) ** 2, 0) / x.length + stack.eps);
  rows.push({ kind: "formula", text: layer ? `y = (x − μ) / σ · γ${bias ? " + β" : ""}` : "y = x / rms · γ" });
  if (layer) rows.push({ kind: "fact", label: "μ", value: number(mean) });
  rows.push({ kind: "fact", label: layer ? "σ" : "rms", value: number(deviation) });
  const n = (value: number) => (value < 0 ? `(${number(value, 2)})` : number(value, 2));
  if (gain) {
    const top = layer ? `(${number(x[0], 2)} − ${n(mean)})` : number(x[0], 2);
    rows.push({ kind: "fact", label: "y[0]", value: `${top} / ${number(deviation, 2)} · ${n(gain[0])}${bias ? ` + ${n(bias[0])}` : ""} = ${number(y[0], 2)}` });
  }
  rows.push({ kind: "vector", label: "x", values: x }, { kind: "vector", label: "y", values: y });
}

/** The largest weights of one head: score, scaled score, weight. */
function explainHead({ flow, box, rows, keys }: Explanation): void {
  const base = box.stage!.replace(/\.heads$/, "");
  const pick = (name: string) => {
    const block = flow.blocks.get(`v:${base}.${name}`);
    return block && (block.values as Float32Array).subarray(box.head * block.shape[1], (box.head + 1) * block.shape[1]);
  };
  const [scores, scaled, weights, output] = [pick("scores"), pick("scaled"), pick("weights"), pick("heads")];
  if (scores && scaled && weights) {
    const { scale, key_dim, score, position } = box.stack;
    const root = key_dim !== undefined && Math.abs(scale - key_dim ** -0.5) < 1e-6;
    const biased = scores.some((one, key) => Math.abs(one * scale - scaled[key]) > 1e-3 * (1 + Math.abs(scaled[key])));
    const recurrent = box.stack.kind === "recurrent" && (score === "additive" ? "aᵀ tanh(q + k)" : "q · k");
    const product = recurrent || (SCORES[score] ?? "q · k");
    const factor = root ? " / √d_k" : scale === 1 ? "" : ` · ${number(scale)}`;
    rows.push({ kind: "formula", text: `softmax(${product}${factor}${biased ? " + b" : ""}) · V` });
    if (biased) rows.push({ kind: "fact", label: "b", value: say("flowBias", positionTitle(position)) });
    if (root) rows.push({ kind: "fact", label: "1/√d_k", value: `1/√${key_dim} = ${number(scale)}` });
    else if (scale !== 1) rows.push({ kind: "fact", label: say("flowScale"), value: number(scale) });
    const best = [...weights.keys()].sort((one, other) => weights[other] - weights[one]).slice(0, 8);
    const heads = [say("stepKey"), product === "q · k" ? product : say("score"), `· ${root ? "1/√d_k" : number(scale, 2)}${biased ? " + b" : ""}`, "softmax"];
    table(rows, heads, best.map((key) => [keys[key] ?? "", number(scores[key], 2), number(scaled[key], 2), number(weights[key])]), best.map((key) => weights[key]));
    const shown = best.reduce((sum, key) => sum + weights[key], 0);
    if (weights.length > best.length) rows.push({ kind: "fact", label: say("flowOtherKeys", weights.length - best.length), value: number(Math.max(0, 1 - shown)) });
  }
  if (output) rows.push({ kind: "vector", label: "Σ w · v", values: output });
}

function explainSoftmax({ flow, rows }: Explanation): void {
  const { best, max, log_sum: total, head } = flow.output;
  rows.push({ kind: "formula", text: "p = e^(logit − max) / Σ e^(logit − max)" });
  if (max === undefined || total === undefined) return;
  rows.push({ kind: "fact", label: "max", value: number(max, 2) }, { kind: "fact", label: "Σ e^(logit − max)", value: number(Math.exp(total - max), 2) });
  const cells = best.map((one) => [one.label, number(one.logit, 2), number(Math.exp(one.logit - max)), number(one.probability)]);
  table(rows, [say(head === "classes" ? "flowClass" : "token"), "logit", "e^(…)", "p"], cells, best.map((one) => one.probability));
}

/** The number beside a box: the length of its vector. */
export function boxNumber(flow: Flow, box: Box): string {
  const values = box.kind === "head" ? headOutput(flow, box) : vector(flow, box.stage);
  return values && values.length > 1 ? number(length(values), length(values) < 100 ? 2 : 0) : "";
}

export function headOutput(flow: Flow, box: Box): Float32Array | null {
  const block = flow.blocks.get(`v:${box.stage}`);
  if (!block) return null;
  const size = block.shape[1];
  return (block.values as Float32Array).subarray(box.head * size, (box.head + 1) * size);
}
