/* What is measured about heads on demand: their roles over examples, and each of them off once for this input.

   Both belong to a question; another one drops them. A large model is measured layer by layer, so the map fills row by
   row, and leaving the view ends it. */

import type { Explorer } from "./explorer.svelte";
import { Refused, off as askOff, roles as askRoles, type Off, type Role, type Roles } from "./server";

export class HeadFacts {
  roles = $state.raw<Roles | null>(null);
  off = $state.raw<Map<string, Off>>(new Map()); // by "part.layer"
  at = $state<number | null>(null); // the position whose changes are shown, or the mean of all
  busy = $state(false);
  refused = $state<string | null>(null);
  #rolesOf = "";
  #offOf = "";

  role(part: string, layer: number, head: number): Role | null {
    return this.roles?.heads.find((one) => one.part === part && one.layer === layer && one.head === head) ?? null;
  }

  /** The change of one head when it is off: at one position, or (null) the mean of all. */
  change(part: string, layer: number, head: number, at: number | null): { change: number; flips: string[] } | null {
    const found = this.off.get(`${part}.${layer}`);
    const row = found?.heads.indexOf(head) ?? -1;
    if (!found || row < 0) return null;
    const { values, shape } = found.blocks.get("changes")! as { values: Float32Array; shape: number[] };
    const flipped = found.blocks.get("flipped")!.values;
    const [from, to] = [row * shape[1], (row + 1) * shape[1]];
    const here = values.subarray(from, to);
    const flips = found.labels.filter((_, index) => flipped[from + index]);
    const mean = here.length ? here.reduce((sum, value) => sum + value, 0) / here.length : 0;
    return { change: at === null ? mean : here[Math.min(at, here.length - 1)], flips };
  }

  /** The tokens of the positions, once they are known. */
  get labels(): string[] {
    return [...this.off.values()][0]?.labels ?? [];
  }

  async measureRoles(explorer: Explorer): Promise<void> {
    const { before } = explorer;
    if (!before || explorer.example) return;
    const question = { ...before.question, changes: {} };
    const own = this.roles?.own && this.#rolesOf.startsWith(`${question.run} ${question.step} `);
    const key = `${question.run} ${question.step} ${JSON.stringify(question)}`;
    if (own || key === this.#rolesOf) return; // the run's own examples do not depend on the input
    this.#rolesOf = key;
    this.roles = null;
    await this.#work(async () => {
      const roles = await askRoles(question);
      if (this.#rolesOf === key) this.roles = roles;
    });
  }

  async measureOff(explorer: Explorer): Promise<void> {
    const { shown } = explorer;
    if (!shown || explorer.example) return;
    const key = JSON.stringify(shown.question);
    if (key === this.#offOf) return;
    this.#offOf = key;
    this.off = new Map();
    await this.#work(async () => {
      for (const { part, layer } of shown.parts) {
        const row = await askOff({ ...shown.question, part, layer });
        if (this.#offOf !== key) return;
        this.off = new Map(this.off).set(`${part}.${layer}`, row);
      }
    });
  }

  /** End a measurement: the rest of its layers is not requested. */
  leave(): void {
    if (this.busy) this.#offOf = "";
  }

  async #work(work: () => Promise<void>): Promise<void> {
    this.refused = null;
    this.busy = true;
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.refused = error.message;
    } finally {
      this.busy = false;
    }
  }
}

export const headFacts = new HeadFacts();
