/* The state of the page: the request, the responses, and pending requests.

   Two responses are kept, the original one and the one with the changes. The newest request wins: a response to an
   older one is dropped. */

import { headMap, meanMap, spaceOf, type Look, type HeadMap, type Part, type PartName } from "./look";
import { anyChange, fromLink, newAsk, noChanges, sameHead, toLink, type Ask, type HeadName } from "./ask";
import { drawScene, fromPixels, toPixels } from "./image";
import * as server from "./server";
import type { RunInfo } from "./server";

const ORDER: PartName[] = ["cross", "decoder", "encoder"]; // which part is shown first
const TYPING = 160; // ms without typing after which the text is sent
const PULSE = 3000; // ms between two checks that the server is running

export class Explorer {
  ask = $state<Ask>(newAsk(""));
  runs = $state.raw<RunInfo[]>([]);
  version = $state("");
  before = $state.raw<Look | null>(null);
  after = $state.raw<Look | null>(null); // null: no changes
  example = $state(true); // the precomputed example is shown while the model is loading
  busy = $state(false);
  gone = $state(false);
  refused = $state<string | null>(null);
  images = $state.raw<Map<string, string>>(new Map()); // name -> URL
  hover = $state<number | null>(null); // the query under the pointer; overrides the pinned one
  fetched = $state.raw<Map<string, HeadMap>>(new Map()); // maps that were requested separately
  tree = $state.raw<server.Tree | null>(null); // the current search tree
  steps = $state.raw<server.Steps | null>(null); // the current steps

  #asked = ""; // the request whose response is shown
  #timer: ReturnType<typeof setTimeout> | undefined;
  #again = false; // the request has changed since it was sent
  #running = false;
  #pending = new Set<string>();

  /** For tests: "ready" means that the response to the current request is shown. */
  status = $derived(this.busy ? "busy" : this.refused ? "refused" : this.example ? "busy" : "ready");
  info = $derived(this.runs.find((run) => run.name === this.ask.run) ?? null);
  touched = $derived(anyChange(this.ask.changes));
  /** The response whose maps are shown. */
  shown = $derived(this.touched && this.ask.show !== "before" && this.after ? this.after : this.before);
  part = $derived(this.#choose());
  head = $derived(this.ask.head === null || !this.part ? null : Math.min(this.ask.head, this.part.heads - 1));
  map = $derived(this.shown && this.part ? this.#find(this.shown, this.part, this.head) : null);
  /** The original map, if there are changes. */
  original = $derived(this.touched && this.before && this.part ? this.#find(this.before, this.part, this.head) : null);
  rows = $derived(this.part && this.shown ? (this.shown.labels[this.part.rows] ?? []) : []);
  columns = $derived(this.part && this.shown ? (this.shown.labels[this.part.columns] ?? []) : []);
  query = $derived(this.#query());

  /** Show the precomputed example, load the list of runs, then request the state of the link. */
  async start(link: string): Promise<void> {
    this.ask = fromLink(link);
    const example = server.prepared().then((look) => {
      if (this.before === null) this.before = look;
    });
    try {
      const { runs, version } = await server.runs();
      this.runs = runs;
      this.version = version;
      const info = runs.find((run) => run.name === this.ask.run) ?? runs.find((run) => !run.error) ?? runs[0];
      if (info && (this.ask.run !== info.name || !link)) this.open(info.name, this.ask.text);
      else {
        if (!this.ask.text) this.ask.text = info?.examples[0] ?? ""; // a link may name a run only
        this.refresh();
      }
    } catch (error) {
      this.fail(error);
    }
    await example.catch(() => undefined); // the page works without it
  }

  /** Open another run with its first example. */
  open(name: string, text = ""): void {
    const info = this.runs.find((run) => run.name === name);
    this.ask = { ...newAsk(name), view: this.ask.view, text: text || (info?.examples[0] ?? "") };
    if (!this.example) this.before = this.after = null; // the example stays until there is a response
    this.#asked = "";
    this.refresh();
  }

  /** An image of the user: cropped and resized here, kept by the server under a name. */
  async takeImage(source: CanvasImageSource): Promise<void> {
    const size = this.before?.size ?? this.info?.size ?? 224;
    try {
      const { bytes, url } = toPixels(source, size);
      const name = await server.keepImage(bytes);
      this.images = new Map(this.images).set(name, url);
      this.ask.image = name;
      this.refresh();
    } catch (error) {
      this.fail(error);
    }
  }

  /** The image of a link, which only the server has. */
  async #recallImage(name: string, size: number): Promise<void> {
    const url = fromPixels(await server.fetchImage(name), size);
    this.images = new Map(this.images).set(name, url);
  }

  /** Apply the state of the URL, after navigation or a pasted link. */
  follow(link: string): void {
    if (link.replace(/^#/, "") === toLink(this.ask)) return;
    const { run } = this.ask;
    this.ask = fromLink(link);
    if (!this.ask.run) this.ask.run = run;
    this.refresh();
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
    if (this.#running) return;
    this.#running = true;
    do {
      this.#again = false;
      await this.#load();
    } while (this.#again);
    this.#running = false;
    this.busy = false;
  }

  async #load(): Promise<void> {
    const { info } = this;
    this.refused = null;
    if (info?.error) return this.#refuse(info.error);
    if (info?.input === "patches" && !this.ask.image) return this.takeImage(drawScene(512));
    if (!info) return;
    if (!this.ask.text && !this.ask.image) return this.#clear();
    try {
      const plain = server.question(this.ask, false);
      const touched = anyChange(this.ask.changes) ? server.question(this.ask, true) : null;
      const key = JSON.stringify(plain);
      if (key !== this.#asked) {
        const before = await server.look(plain);
        this.fetched = new Map();
        this.before = before;
        this.after = null;
        this.#asked = key;
        this.example = false;
        const { image } = before.question;
        if (image && before.size && !this.images.has(image)) await this.#recallImage(image, before.size);
      }
      const after = touched && (await server.look(touched));
      this.#forget("after");
      this.after = after;
      this.gone = false;
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error: unknown): void {
    if (error instanceof server.Gone) this.gone = true;
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
          this.gone = false;
          this.refresh();
        }
      } catch (error) {
        if (error instanceof server.Gone) this.gone = true;
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

  pin(at: number | null): void {
    if (!this.part) return;
    const space = spaceOf(this.part.rows);
    this.ask.query[space] = this.ask.query[space] === at ? null : at;
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

  /** Replace the weights of one query of one head; null restores them. */
  setRow(part: PartName, layer: number, head: number, query: number, weights: number[] | null, wait = 0): void {
    const others = this.ask.changes.rows.filter(
      (row) => row[0] !== part || row[1] !== layer || row[2] !== head || row[3] !== query,
    );
    this.ask.changes.rows = weights ? [...others, [part, layer, head, query, weights]] : others;
    this.refresh(wait);
  }

  reset(): void {
    this.ask.changes = noChanges();
    this.ask.show = "after";
    this.refresh();
  }
}

export const explorer = new Explorer();
