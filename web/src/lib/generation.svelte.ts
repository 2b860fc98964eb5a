/* Generation step by step: the tokens so far, those that were computed ahead, and the player. */

import { explorer } from "./explorer.svelte";
import type { Look } from "./look";
import { generate, type GenerationStep } from "./server";

export const AHEAD = 8; // tokens requested at once while playing
const PACE = 800; // ms per token

export class Generation {
  steps = $state.raw<GenerationStep[]>([]); // shown so far
  at = $state(0); // the step that is looked at
  playing = $state(false);
  waiting = $state(false);
  ended = $state(false);
  #ahead: GenerationStep[] = [];
  #look: Look | null = null;
  #number = 0; // of the latest request
  #timer: ReturnType<typeof setTimeout> | undefined;

  step = $derived<GenerationStep | null>(this.steps[Math.min(this.at, this.steps.length - 1)] ?? null);

  /** Begin again for another input. */
  begin(look: Look | null): void {
    if (look === this.#look) return;
    this.#look = look;
    this.restart();
  }

  restart(): void {
    this.pause();
    [this.steps, this.at, this.ended] = [[], 0, false];
    this.forget();
  }

  /** Other settings: what was computed ahead is not valid any more. */
  forget(): void {
    this.#ahead = [];
    this.#number++;
    this.waiting = false;
  }

  pause(): void {
    this.playing = false;
    clearTimeout(this.#timer);
  }

  play(): void {
    if (this.playing) return this.pause();
    if (this.ended) this.restart();
    this.playing = true;
    void this.#loop();
  }

  async #loop(): Promise<void> {
    if (!this.playing) return;
    await this.next(AHEAD);
    if (this.ended) this.pause();
    if (this.playing) this.#timer = setTimeout(() => void this.#loop(), PACE);
  }

  /** Show one more token; `count` are requested if none was computed ahead. */
  async next(count = 1): Promise<void> {
    const look = this.#look;
    if (!look || this.ended || this.waiting) return;
    if (!this.#ahead.length) {
      const number = ++this.#number;
      this.waiting = true;
      try {
        const prefix = this.steps.map((step) => step.id);
        const found = await generate({ ...look.question, prefix, count, sampling: explorer.ask.sampling });
        if (number !== this.#number) return;
        this.#ahead = found;
        if (!found.length) this.ended = true; // no position is left
      } catch (error) {
        if (number !== this.#number) return;
        this.pause();
        explorer.fail(error);
      } finally {
        if (number === this.#number) this.waiting = false;
      }
    }
    const [first, ...rest] = this.#ahead;
    if (!first) return;
    this.#ahead = rest;
    this.steps = [...this.steps, first];
    this.at = this.steps.length - 1;
    this.ended = first.ended;
  }
}

export const generation = new Generation();
