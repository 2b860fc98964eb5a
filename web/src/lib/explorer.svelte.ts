/* The state of the page: the request, the responses, and pending requests.

   Two responses are kept, the original one and the one with the changes. The newest request wins: a response to an
   older one is dropped. */

import { headMap, meanMap, spaceOf, type Look, type HeadMap, type Part, type PartName, type Space } from "./look";
import { anyChange, fromLink, newAsk, noChanges, sameHead, toLink, type Ask, type HeadName } from "./ask";
import { drawScene, fromPixels, toPixels } from "./image";
import { past } from "./past.svelte";
import * as server from "./server";
import type { RunInfo } from "./server";

const ORDER: PartName[] = ["cross", "decoder", "encoder"]; // which part is shown first
const TYPING = 160; // ms without typing after which the text is sent
const SLOW = 1000; // ms after which a request is abandoned for a newer one
const PULSE = 3000; // ms between two checks that the server is running

export class Explorer {
  ask = $state<Ask>(newAsk(""));
  runs = $state.raw<RunInfo[]>([]);
  version = $state("");
  command = $state("regard explore"); // starts the server again
  before = $state.raw<Look | null>(null);
  after = $state.raw<Look | null>(null); // null: no changes
  example = $state(true); // the precomputed example is shown while the model is loading
  busy = $state(false);
  gone = $state<"" | "stopped" | "replaced">("");
  resized = $state<[number, number] | null>(null); // width and height of the user's image, which the model reads smaller
  refused = $state<string | null>(null);
  missing = $state(""); // the model of a link, if it is not here
  images = $state.raw<Map<string, string>>(new Map()); // name -> URL
  hover = $state<number | null>(null); // the query under the pointer; overrides the pinned one
  fetched = $state.raw<Map<string, HeadMap>>(new Map()); // maps that were requested separately
  tree = $state.raw<server.Tree | null>(null); // the current search tree
  steps = $state.raw<server.Steps | null>(null); // the current steps

  own = false; // the page itself has changed the request: no entry of the history
  #ownTarget: string | null = null; // the target that `atStep` has set
  #asked = ""; // the request whose response is shown
  #timer: ReturnType<typeof setTimeout> | undefined;
  #again = false; // the request has changed since it was sent
  #running: AbortController | null = null;
  #since = 0; // when the running request was sent
  #fresh = true; // an empty input gets an example
  #pending = new Set<string>();

  /** For tests: "ready" means that the response to the current request is shown. */
  status = $derived(this.busy ? "busy" : this.refused ? "refused" : this.example ? "busy" : "ready");
  info = $derived(this.runs.find((run) => run.name === this.ask.run) ?? null);
  touched = $derived(anyChange(this.ask.changes));
  /** The response whose maps are shown. */
  shown = $derived(this.touched && this.ask.show !== "before" && this.after ? this.after : this.before);
  /** What is shown belongs to an earlier input: the response to the current one is not there yet, or it was refused. */
  stale = $derived(
    !this.example && this.before !== null && JSON.stringify(server.question(this.ask, false)) !== JSON.stringify(this.before.question),
  );
  part = $derived(this.#choose());
  head = $derived(this.ask.head === null || !this.part ? null : Math.min(this.ask.head, this.part.heads - 1));
  map = $derived(this.shown && this.part ? this.#find(this.shown, this.part, this.head) : null);
  /** The original map, if there are changes. */
  original = $derived(this.touched && this.before && this.part ? this.#find(this.before, this.part, this.head) : null);
  rows = $derived(this.part && this.shown ? (this.shown.labels[this.part.rows] ?? []) : []);
  columns = $derived(this.part && this.shown ? (this.shown.labels[this.part.columns] ?? []) : []);
  query = $derived(this.#query());
  /** The side whose tokens have outputs, and the selected one of each side: the same in every view and panel. */
  outputSpace = $derived<Space>(["target", "values"].includes(this.shown?.output.kind ?? "") ? "target" : "source");
  selected = $derived<Record<Space, number>>({ source: this.#selected("source"), target: this.#selected("target") });

  /** Show the precomputed example, load the list of runs, then request the state of the link. */
  async start(link: string): Promise<void> {
    this.ask = fromLink(link); // its view and text, while the list is loading
    const example = server.prepared().then((look) => {
      if (this.before === null) this.before = look;
    });
    try {
      const { runs, version, command } = await server.runs();
      [this.runs, this.version, this.command] = [runs, version, command];
      this.#enter(link, (runs.find((run) => !run.error) ?? runs[0])?.name ?? "");
    } catch (error) {
      this.fail(error);
    }
    await example.catch(() => undefined); // the page works without it
  }

  /** Apply a link. Without a model it is for `usual`; of a link for a model that is not here, the text is kept. */
  #enter(link: string, usual: string): void {
    const asked = fromLink(link);
    asked.run ||= usual;
    this.ask = asked;
    if (!this.runs.some((run) => run.name === asked.run)) {
      this.open(usual, asked.text);
      this.missing = asked.run;
      return;
    }
    this.missing = "";
    this.#fresh = true;
    this.refresh();
  }

  /** Open another run with its first example. */
  open(name: string, text = ""): void {
    this.missing = "";
    this.ask = { ...newAsk(name), view: this.ask.view, tour: this.ask.tour, text };
    this.#fresh = true;
    if (!this.example) this.before = this.after = null; // the example stays until there is a response
    this.#asked = "";
    this.refresh();
  }

  /** An image of the user as the input. */
  async takeImage(source: CanvasImageSource, own = false): Promise<void> {
    const size = this.before?.size ?? this.info?.size ?? 224;
    try {
      const { width, height } = source as { width: number; height: number };
      this.resized = own || (width === size && height === size) ? null : [width, height];
      const name = await this.storeImage(source);
      this.own = own;
      this.ask.image = name;
      this.refresh();
    } catch (error) {
      this.fail(error);
    }
  }

  /** Crop and resize an image for the server to keep; returns its name. */
  async storeImage(source: CanvasImageSource): Promise<string> {
    const { bytes, url } = toPixels(source, this.before?.size ?? this.info?.size ?? 224);
    const name = await server.keepImage(bytes);
    this.images = new Map(this.images).set(name, url);
    return name;
  }

  /** The image of a link, which only the server has. */
  async #recallImage(name: string, size: number): Promise<void> {
    const url = fromPixels(await server.fetchImage(name), size);
    this.images = new Map(this.images).set(name, url);
  }

  /** Load an example image for display. */
  async showImage(name: string, size: number): Promise<void> {
    if (!this.images.has(name)) await this.#recallImage(name, size).catch(() => undefined);
  }

  /** Apply the state of the URL, after navigation or a pasted link. */
  follow(link: string): void {
    if (link.replace(/^#/, "") === toLink(this.ask)) return;
    this.#enter(link, this.ask.run);
  }

  /** Show an example; its target is what the test data has. */
  try(example: server.Example): void {
    this.resized = null;
    if (example.text !== undefined) return this.type(example.text);
    this.ask.image = example.image ?? null;
    this.ask.query = { source: null, target: null };
    this.refresh();
  }

  /** The first example for an empty input; a link may name a run only. */
  async #begin(info: RunInfo): Promise<void> {
    this.#fresh = false;
    if (this.ask.text || this.ask.image) return;
    let examples = info.examples;
    if (examples === null) {
      examples = await server.examples(info.name);
      this.runs = this.runs.map((run) => (run.name === info.name ? { ...run, examples } : run));
    }
    const [first] = examples;
    if (!first || this.ask.run !== info.name) return;
    this.own = true;
    this.ask.text = first.text ?? "";
    this.ask.image = first.image ?? null;
  }

  type(text: string): void {
    this.ask.text = text;
    this.ask.changes.rows = []; // they belong to the tokens of the old text
    this.ask.query = { source: null, target: null };
    this.refresh(TYPING);
  }

  write(target: string | null): void {
    this.ask.target = target;
    this.ask.changes.rows = [];
    this.refresh(TYPING);
  }

  refresh(wait = 0): void {
    clearTimeout(this.#timer);
    this.busy = true;
    this.#timer = setTimeout(() => void this.#look(), wait);
  }

  /** One request at a time: of the changes in the meantime only the newest is requested next. */
  async #look(): Promise<void> {
    this.#again = true;
    if (this.#running) {
      if (performance.now() - this.#since > SLOW) this.#running.abort(); // the server then stops computing it
      return;
    }
    do {
      this.#again = false;
      this.#since = performance.now();
      this.#running = new AbortController();
      await this.#load(this.#running.signal);
    } while (this.#again);
    this.#running = null;
    this.busy = false;
  }

  async #load(signal: AbortSignal): Promise<void> {
    const { info } = this;
    this.refused = null;
    if (info?.error) return this.#refuse(info.error);
    try {
      if (info && this.#fresh) await this.#begin(info);
    } catch (error) {
      return this.fail(error);
    }
    if (info?.input === "patches" && !this.ask.image) return this.takeImage(drawScene(512), true);
    if (!info) return;
    if (!this.ask.text && !this.ask.image) return this.#clear();
    try {
      const plain = server.question(this.ask, false);
      const touched = anyChange(this.ask.changes) ? server.question(this.ask, true) : null;
      const key = JSON.stringify(plain);
      if (key !== this.#asked) {
        const before = await server.look(plain, signal);
        this.fetched = new Map();
        this.before = before;
        this.after = null;
        this.#asked = key;
        this.example = false;
        const { image } = before.question;
        if (image && before.size && !this.images.has(image)) await this.#recallImage(image, before.size);
      }
      const after = touched && (await server.look(touched, signal));
      this.#forget("after");
      this.after = after;
      this.gone = "";
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error: unknown): void {
    if (error instanceof server.Aborted) return; // there is a newer request
    if (error instanceof server.Gone) this.gone = "stopped";
    else if (error instanceof server.Replaced) this.gone = "replaced";
    else this.#refuse(error instanceof Error ? error.message : String(error));
  }

  /** Without a text there is nothing to show, not even the maps of the previous one. */
  #clear(): void {
    this.before = this.after = null;
    this.example = false;
    this.#asked = "";
  }

  /** Show the error, and remove the example, which could be mistaken for the response. */
  #refuse(sentence: string): void {
    this.refused = sentence;
    if (this.example) this.before = null;
    this.example = false;
  }

  /** Detect when the server stops, and when it is running again. */
  async pulse(): Promise<void> {
    for (;;) {
      await new Promise((done) => setTimeout(done, PULSE));
      if (document.hidden) continue;
      try {
        await server.alive();
        if (this.gone) {
          this.gone = "";
          this.refresh();
        }
      } catch (error) {
        if (error instanceof server.Gone || error instanceof server.Replaced) this.fail(error);
      }
    }
  }

  // --- maps

  #choose(): Part | null {
    const parts = this.shown?.parts ?? [];
    const name = parts.some((part) => part.part === this.ask.part)
      ? this.ask.part
      : ORDER.find((one) => parts.some((part) => part.part === one));
    const layers = parts.filter((part) => part.part === name);
    return layers[Math.min(this.ask.layer, layers.length - 1)] ?? null;
  }

  #query(): number | null {
    if (!this.part) return null;
    const at = this.hover ?? this.ask.query[spaceOf(this.part.rows)];
    return at !== null && at < this.rows.length ? at : null;
  }

  /** The user's choice, or a default: the token before the next one, a masked one, else the first after <s>. */
  #selected(space: Space): number {
    const output = this.shown?.output;
    const sides = space === "source" ? (["source"] as const) : (["written", "read"] as const);
    const last = Math.max(0, ...sides.map((side) => (this.shown?.labels[side]?.length ?? 1) - 1));
    const chosen = this.ask.query[space];
    if (chosen !== null && chosen <= last) return chosen;
    if (space === "target") return Math.min(1, last);
    if (output?.kind === "next") return last;
    const masked = output?.kind === "masked" ? output.positions.findIndex((position) => position.expected === null) : -1;
    if (masked >= 0) return masked;
    const special = /^[<[]/.test(this.shown?.labels.source?.[0] ?? ""); // <s>, [CLS]: predictions there mean nothing
    return special && (output?.kind === "tags" || output?.kind === "masked") ? Math.min(1, last) : 0;
  }

  #key(look: Look, part: Part, head: number): string {
    return `${look === this.after ? "after" : "before"} ${part.part} ${part.layer} ${head}`;
  }

  /** A map, or null while it is loading. */
  #find(look: Look, part: Part, head: number | null): HeadMap | null {
    const one = (index: number) => headMap(look, part, index) ?? this.fetched.get(this.#key(look, part, index));
    if (head !== null) return one(head) ?? null;
    const all = Array.from({ length: part.heads }, (_, index) => one(index));
    return all.every((map) => map !== undefined) ? meanMap(all as HeadMap[]) : null;
  }

  /** A head's map of the response that is shown, or null if it was not loaded. */
  mapOf(part: Part, head: number): HeadMap | null {
    return this.shown && this.#find(this.shown, part, head);
  }

  /** Request the current maps that the response did not contain. */
  async complete(): Promise<void> {
    const { part, head, shown, before } = this;
    if (!part || part.whole || !shown || !before || this.example) return;
    for (const look of new Set([shown, before])) {
      const wanted = head === null ? Array.from({ length: part.heads }, (_, index) => index) : [head];
      const heads = wanted.filter((index) => {
        const key = this.#key(look, part, index);
        return !this.fetched.has(key) && !this.#pending.has(key);
      });
      if (!heads.length) continue;
      const keys = heads.map((index) => this.#key(look, part, index));
      keys.forEach((key) => this.#pending.add(key));
      try {
        const { values, shape } = await server.maps({ ...look.question, part: part.part, layer: part.layer, heads });
        if (look !== this.before && look !== this.after) continue; // there is a newer response
        const [, rows, columns] = shape;
        const more = new Map(this.fetched);
        keys.forEach((key, index) => {
          const size = rows * columns;
          more.set(key, { values: (values as Uint16Array).subarray(index * size, (index + 1) * size), rows, columns });
        });
        this.fetched = more;
      } catch (error) {
        this.fail(error);
      } finally {
        keys.forEach((key) => this.#pending.delete(key));
      }
    }
  }

  #forget(which: string): void {
    this.fetched = new Map([...this.fetched].filter(([key]) => !key.startsWith(which)));
  }

  // --- changes

  select(part: PartName, layer: number, head: number | null): void {
    this.ask.part = part;
    this.ask.layer = layer;
    this.ask.head = head;
  }

  /** Select a query of the current map; the selected one is released. */
  pin(at: number | null): void {
    if (!this.part) return;
    const space = spaceOf(this.part.rows);
    this.choose(space, this.ask.query[space] === at ? null : at);
  }

  /** Select a token of a side; null returns to the default. */
  choose(space: Space, at: number | null): void {
    this.ask.query[space] = at;
  }

  isOff(head: HeadName): boolean {
    return this.ask.changes.heads.some((one) => sameHead(one, head));
  }

  toggleHead(head: HeadName): void {
    const { heads } = this.ask.changes;
    this.ask.changes.heads = this.isOff(head) ? heads.filter((one) => !sameHead(one, head)) : [...heads, head];
    this.refresh();
  }

  layerOff(part: PartName, layer: number): boolean {
    return this.ask.changes.layers.some(([stack, at]) => stack === part && at === layer);
  }

  toggleLayer(part: PartName, layer: number): void {
    const { layers } = this.ask.changes;
    this.ask.changes.layers = this.layerOff(part, layer)
      ? layers.filter(([stack, at]) => stack !== part || at !== layer)
      : [...layers, [part, layer]];
    this.refresh();
  }

  /** Switch a feed-forward layer off; null switches it on. */
  setFeedforward(stack: PartName, layer: number, how: "zero" | "mean" | null): void {
    const others = this.ask.changes.feedforward.filter((one) => one[0] !== stack || one[1] !== layer);
    this.ask.changes.feedforward = how ? [...others, [stack, layer, how]] : others;
    this.refresh();
  }

  /** Replace the weights of one query of one head; null restores them. */
  setRow(part: PartName, layer: number, head: number, query: number, weights: number[] | null, wait = 0): void {
    const others = this.ask.changes.rows.filter(
      (row) => row[0] !== part || row[1] !== layer || row[2] !== head || row[3] !== query,
    );
    this.ask.changes.rows = weights ? [...others, [part, layer, head, query, weights]] : others;
    this.refresh(wait);
  }

  /** Show the weights of a snapshot, or (null) of the trained model. All steps get the target that the trained model
      generates, so that their maps and losses can be compared. */
  atStep(step: number | null): void {
    const { ask, before } = this;
    if (ask.step === null && step !== null && ask.target === null) {
      ask.target = before?.output.before.generated ?? null;
      this.#ownTarget = ask.target;
    } else if (step === null && ask.target === this.#ownTarget) ask.target = null;
    ask.step = step;
    this.refresh(60);
  }

  reset(): void {
    this.ask.changes = noChanges();
    this.ask.show = "after";
    this.refresh();
  }

  /** Undo the latest change of the model, or redo it. */
  undo(redo = false): void {
    const changes = past.step(redo);
    if (!changes) return;
    this.ask.changes = { ...noChanges(), ...changes };
    this.refresh();
  }
}

export const explorer = new Explorer();
