/* Text to ids and back, the same as `regard.text.tokenizer`: every part of tokenizer.json that Regard writes or imports.

   normaliser -> pre-tokeniser (words) -> model (tokens of the vocabulary) -> ids,   ids -> tokens -> decoder -> text

   Special tokens never come out of text: "<s>" is three characters. */

type Json = Record<string, any>;
type Split = (text: string) => string[];

const WHITE = "\\p{White_Space}"; // not \s, which has U+FEFF and lacks U+0085
const GPT2 = new RegExp(
  `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${WHITE}\\p{L}\\p{N}]+|${WHITE}+(?![^${WHITE}])|${WHITE}+`,
  "gu",
);
const SPACES = new RegExp(`${WHITE}+`, "u");
const MARK = /[\p{P}$+<=>^`|~]/gu; // punctuation of Unicode, and that of ASCII
const utf8 = new TextEncoder();

function utf8Text(bytes: Uint8Array): string {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes); // U+FEFF is a character like others
}

/** The character that represents each byte in a byte-level vocabulary. */
const BYTES: string[] = (() => {
  const own = (byte: number) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(own(byte) ? byte : next++));
})();
const BYTE_OF = new Map(BYTES.map((char, byte) => [char, byte]));

function escaped(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&");
}

/** Pieces of a text: those that match stay whole, and what is between them. */
function isolate(text: string, pattern: RegExp): string[] {
  const pieces: string[] = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > at) pieces.push(text.slice(at, match.index));
    if (match[0]) pieces.push(match[0]);
    at = match.index + match[0].length;
  }
  if (at < text.length) pieces.push(text.slice(at));
  return pieces;
}

function normaliser(part: Json | null): (text: string) => string {
  switch (part?.type) {
    case undefined:
      return (text) => text;
    case "NFC":
    case "NFD":
    case "NFKC":
    case "NFKD":
      return (text) => text.normalize(part!.type);
    case "Lowercase":
      return (text) => [...text].map((char) => char.toLowerCase()).join("");
    case "Sequence": {
      const steps: ((text: string) => string)[] = part!.normalizers.map(normaliser);
      return (text) => steps.reduce((value, step) => step(value), text);
    }
    case "BertNormalizer":
      return (text) => bert(text, part!);
  }
  throw new Error(`tokenizer.json: normalizer ${part!.type}`);
}

function bert(text: string, part: Json): string {
  if (part.clean_text)
    text = text.replace(/[\0\ufffd]|(?![\t\n\r])[\p{Cc}\p{Cf}\p{Co}]/gu, "").replace(new RegExp(WHITE, "gu"), " ");
  if (part.handle_chinese_chars)
    text = text.replace(/[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u{20000}-\u{2a6df}\u{2a700}-\u{2ceaf}\u{2f800}-\u{2fa1f}]/gu, " $& ");
  if (part.strip_accents ?? part.lowercase) text = text.normalize("NFD").replace(/\p{Mn}/gu, "");
  return part.lowercase ? text.toLowerCase() : text;
}

function preTokeniser(part: Json | null): Split {
  switch (part?.type) {
    case undefined:
      return (text) => [text];
    case "Sequence": {
      const steps: Split[] = part!.pretokenizers.map(preTokeniser);
      return (text) => steps.reduce((words, step) => words.flatMap(step), [text]);
    }
    case "WhitespaceSplit":
      return (text) => text.split(SPACES).filter(Boolean);
    case "BertPreTokenizer":
      return (text) => text.split(SPACES).filter(Boolean).flatMap((word) => isolate(word, MARK));
    case "Punctuation":
      return (text) => isolate(text, MARK);
    case "Digits":
      return (text) => isolate(text, part!.individual_digits ? /\p{N}/gu : /\p{N}+/gu);
    case "FixedLength":
      return (text) => {
        const chars = [...text];
        return chars.flatMap((_, at) => (at % part!.length ? [] : [chars.slice(at, at + part!.length).join("")]));
      };
    case "Metaspace":
      return (text) => {
        const space = part!.replacement;
        text = text.replaceAll(" ", space);
        if (part!.prepend_scheme !== "never" && !text.startsWith(space)) text = space + text;
        return part!.split === false ? [text] : text.split(new RegExp(`(?=${escaped(space)})`, "u"));
      };
    case "ByteLevel":
      return (text) => {
        if (part!.add_prefix_space && !text.startsWith(" ")) text = ` ${text}`;
        const words = part!.use_regex === false ? [text] : (text.match(GPT2) ?? []);
        return words.map((word) => Array.from(utf8.encode(word), (byte) => BYTES[byte]).join(""));
      };
  }
  throw new Error(`tokenizer.json: pre_tokenizer ${part!.type}`);
}

interface Model {
  ids: Map<string, number>;
  segment(word: string): number[];
}

function bytesOf(token: string, ids: Map<string, number>): number[] | null {
  const found = Array.from(utf8.encode(token), (byte) =>
    ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`),
  );
  return found.every((id) => id !== undefined) ? (found as number[]) : null;
}

function wordLevel(part: Json): Model {
  const ids = new Map<string, number>(Object.entries(part.vocab));
  const unknown = ids.get(part.unk_token);
  return { ids, segment: (word) => [ids.get(word) ?? unknown!].filter((id) => id !== undefined) };
}

function wordPiece(part: Json): Model {
  const ids = new Map<string, number>(Object.entries(part.vocab));
  const prefix = part.continuing_subword_prefix;
  return {
    ids,
    segment(word) {
      const chars = [...word];
      const found: number[] = [];
      for (let at = 0; at < chars.length; ) {
        let end = chars.length;
        let id: number | undefined;
        for (; end > at; end--) {
          id = ids.get((at ? prefix : "") + chars.slice(at, end).join(""));
          if (id !== undefined) break;
        }
        if (id === undefined || chars.length > part.max_input_chars_per_word) return [ids.get(part.unk_token)!];
        found.push(id);
        at = end;
      }
      return found;
    },
  };
}

/** Adjacent tokens are merged, the pair with the lowest rank first. */
function bpe(part: Json): Model {
  const ids = new Map<string, number>(Object.entries(part.vocab));
  const ranks = new Map<string, number>();
  part.merges.forEach((merge: string | string[], rank: number) => {
    const pair = typeof merge === "string" ? merge.split(" ") : merge;
    ranks.set(pair.join("\n"), rank);
  });
  const unknown = part.unk_token == null ? undefined : ids.get(part.unk_token);
  const known = new Map<string, number[]>(); // words repeat
  return {
    ids,
    segment(word) {
      const whole = part.ignore_merges ? ids.get(word) : undefined;
      if (whole !== undefined) return [whole];
      let found = known.get(word);
      if (found) return found;
      const parts = [...word];
      for (;;) {
        let best = Infinity;
        let where = -1;
        for (let at = 0; at + 1 < parts.length; at++) {
          const rank = ranks.get(`${parts[at]}\n${parts[at + 1]}`) ?? Infinity;
          if (rank < best) [best, where] = [rank, at];
        }
        if (where < 0) break;
        parts.splice(where, 2, parts[where] + parts[where + 1]);
      }
      found = [];
      let fused = false;
      for (const token of parts) {
        const id = ids.get(token);
        const spelled = id === undefined && part.byte_fallback ? bytesOf(token, ids) : null;
        if (id !== undefined) found.push(id);
        else if (spelled) found.push(...spelled);
        else if (unknown !== undefined && !(fused && part.fuse_unk)) found.push(unknown);
        fused = id === undefined && !spelled;
      }
      if (known.size > 10_000) known.clear();
      known.set(word, found);
      return found;
    },
  };
}

/** The segmentation with the highest sum of log-probabilities (Viterbi); a character without a token costs 10 more than
    the least probable token, and neighbouring ones are one unknown token. */
function unigram(part: Json): Model {
  const vocab: [string, number][] = part.vocab;
  const ids = new Map(vocab.map(([token], id) => [token, id]));
  const longest = Math.max(...vocab.map(([token]) => token.length));
  const penalty = Math.min(...vocab.map(([, score]) => score)) - 10;
  const unknown: number | null = part.unk_id;
  return {
    ids,
    segment(word) {
      const score = new Float64Array(word.length + 1);
      const from = new Int32Array(word.length + 1).fill(-1);
      const id = new Int32Array(word.length + 1);
      const offer = (at: number, end: number, value: number, token: number) => {
        if (from[end] < 0 || score[at] + value > score[end]) [score[end], from[end], id[end]] = [score[at] + value, at, token];
      };
      for (let at = 0; at < word.length; ) {
        const step = word.codePointAt(at)! > 0xffff ? 2 : 1;
        let single = false;
        for (let end = at + 1; end <= Math.min(word.length, at + longest); end++) {
          const token = ids.get(word.slice(at, end));
          if (token === undefined) continue;
          offer(at, end, vocab[token][1], token);
          single ||= end === at + step;
        }
        if (!single) offer(at, at + step, penalty, unknown ?? -1);
        at += step;
      }
      const found: number[][] = [];
      let before = false; // an unknown token was last
      for (let end = word.length; end > 0; end = from[end]) {
        if (id[end] !== unknown) found.push([id[end]]);
        else {
          const spelled = part.byte_fallback ? bytesOf(word.slice(from[end], end), ids) : null;
          if (spelled) found.push(spelled);
          else if (!before) found.push([unknown!]);
          before = !spelled;
          continue;
        }
        before = false;
      }
      return found.reverse().flat();
    },
  };
}

const MODELS: Record<string, (part: Json) => Model> = { WordLevel: wordLevel, WordPiece: wordPiece, BPE: bpe, Unigram: unigram };

function decoder(part: Json | null): (tokens: string[]) => string[] {
  switch (part?.type) {
    case "Sequence": {
      const steps: ((tokens: string[]) => string[])[] = part!.decoders.map(decoder);
      return (tokens) => steps.reduce((value, step) => step(value), tokens);
    }
    case "Fuse":
      return (tokens) => [tokens.join("")];
    case "ByteLevel":
      return (tokens) => [utf8Text(Uint8Array.from(tokens.flatMap(bytes)))];
    case "Metaspace":
      return (tokens) =>
        tokens.map((token, at) => {
          const text = token.replaceAll(part!.replacement, " ");
          return at === 0 && part!.prepend_scheme !== "never" ? text.replace(/^ /, "") : text;
        });
    case "Replace":
      return (tokens) => tokens.map((token) => token.replaceAll(part!.pattern.String, part!.content));
    case "Strip":
      return (tokens) =>
        tokens.map((token) => {
          let [start, stop] = [0, token.length];
          while (start < part!.start && token[start] === part!.content) start++;
          while (token.length - stop < part!.stop && stop > start && token[stop - 1] === part!.content) stop--;
          return token.slice(start, stop);
        });
    case "ByteFallback":
      return (tokens) => {
        const found: string[] = [];
        let spelled: number[] = [];
        const flush = () => {
          if (!spelled.length) return;
          const text = utf8Text(Uint8Array.from(spelled));
          found.push(text.includes("\ufffd") ? "\ufffd".repeat(spelled.length) : text);
          spelled = [];
        };
        for (const token of tokens) {
          const byte = /^<0x([0-9A-F]{2})>$/.exec(token);
          if (byte) spelled.push(parseInt(byte[1], 16));
          else {
            flush();
            found.push(token);
          }
        }
        flush();
        return found;
      };
    case "WordPiece":
      return (tokens) =>
        tokens.map((token, at) => {
          let text = token.startsWith(part!.prefix) && at ? token.slice(part!.prefix.length) : at ? ` ${token}` : token;
          if (part!.cleanup)
            for (const mark of [".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"]) text = text.replaceAll(` ${mark}`, mark);
          return text;
        });
    case undefined:
      return (tokens) => [tokens.join(" ")];
  }
  throw new Error(`tokenizer.json: decoder ${part!.type}`);
}

function unprintable(char: string): string {
  const named: Record<string, string> = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };
  const code = char.codePointAt(0)!;
  const [mark, digits] = code < 256 ? ["x", 2] : code < 65536 ? ["u", 4] : ["U", 8];
  return named[char] ?? `\\${mark}${code.toString(16).padStart(digits as number, "0")}`;
}

/** The bytes of a token of a byte-level vocabulary. */
function bytes(token: string): number[] {
  const own = [...token].map((char) => BYTE_OF.get(char));
  return own.every((byte) => byte !== undefined) ? (own as number[]) : [...utf8.encode(token)];
}

export class Tokenizer {
  readonly specials: Set<number>;
  readonly size: number;
  private readonly names: string[] = [];
  private readonly model: Model;
  private readonly normalise: (text: string) => string;
  private readonly split: Split;
  private readonly join: (tokens: string[]) => string[];
  private readonly byteLevel: boolean;
  private readonly symbols: RegExp | null;
  private readonly added = new Map<string, number>();

  constructor(json: Json) {
    const build = MODELS[json.model.type];
    if (!build) throw new Error(`tokenizer.json: model ${json.model.type}`);
    this.model = build(json.model);
    for (const [token, id] of this.model.ids) this.names[id] = token;
    const special = json.added_tokens.filter((one: Json) => one.special);
    this.specials = new Set(special.map((one: Json) => one.id));
    for (const one of json.added_tokens) {
      this.names[one.id] = one.content;
      if (!one.special) this.added.set(one.content, one.id);
    }
    this.size = this.names.length;
    this.symbols = this.added.size
      ? new RegExp([...this.added.keys()].sort((a, b) => b.length - a.length).map(escaped).join("|"), "gu")
      : null;
    this.normalise = normaliser(json.normalizer);
    const words = preTokeniser(json.pre_tokenizer);
    const starts = json.model.type === "Unigram" ? splitSpecials(json.model.vocab, special) : null;
    this.split = starts ? (text) => isolate(text, starts).flatMap(words) : words;
    this.join = decoder(json.decoder);
    this.byteLevel = JSON.stringify(json.decoder ?? "").includes('"ByteLevel"');
  }

  encode(text: string): number[] {
    const pieces = this.symbols ? isolate(text, this.symbols) : text ? [text] : [];
    return pieces.flatMap((piece) => {
      const symbol = this.added.get(piece);
      if (symbol !== undefined) return [symbol];
      return this.split(this.normalise(piece)).flatMap((word) => (word ? this.model.segment(word) : []));
    });
  }

  decode(ids: number[]): string {
    const tokens = ids.filter((id) => !this.specials.has(id)).map((id) => this.names[id] ?? "");
    return tokens.length ? this.join(tokens).join("") : "";
  }

  /** A token in readable form: a space is "▁", a byte of an incomplete character "\xea". */
  token(id: number): string {
    let token = this.names[id] ?? "";
    if (this.byteLevel && !this.specials.has(id)) {
      const own = bytes(token);
      token = utf8Text(Uint8Array.from(own));
      if (token.includes("\ufffd")) token = own.map((byte) => (byte < 128 ? String.fromCharCode(byte) : `\\x${byte.toString(16)}`)).join("");
    }
    return token.replace(/(?! )[\p{C}\p{Z}]/gu, unprintable).replaceAll(" ", "▁");
  }

  id(name: string): number | undefined {
    const id = this.names.indexOf(name);
    return id < 0 ? undefined : id;
  }

  /** Whether tokens include the space before a word. */
  get hasSpaces(): boolean {
    return this.names.some((_, id) => /^▁./u.test(this.token(id)));
  }
}

/** Where strings such as "<s>" are split after their first character, so that no token matches them. */
function splitSpecials(vocab: [string, number][], specials: Json[]): RegExp | null {
  const scores = new Map(vocab);
  const lowest = Math.min(...scores.values());
  const starts = specials
    .map((one) => one.content as string)
    .filter((name) => ((scores.get(name) ?? 0) > lowest || lowest === 0) && [...name].length > 1)
    .map((name) => `${escaped([...name][0])}(?=${escaped([...name].slice(1).join(""))})`);
  return starts.length ? new RegExp(starts.join("|"), "gu") : null;
}
