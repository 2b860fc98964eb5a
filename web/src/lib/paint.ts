/* Maps onto canvases. A map larger than its area is downsampled: each pixel shows the largest weight of its block,
   so that a single strong line never disappears between two pixels. */

import type { Palette } from "./colour";

export interface Field {
  values: ArrayLike<number>;
  rows: number;
  columns: number;
}

/** Pixels of at most `height` x `width` for a map, one per cell if there is room. */
export function pixels(field: Field, most: number, colours: Palette, height: number, width: number): ImageData {
  const { values, rows, columns } = field;
  const high = Math.min(rows, Math.max(1, Math.floor(height)));
  const wide = Math.min(columns, Math.max(1, Math.floor(width)));
  const image = new ImageData(wide, high);
  const words = new Uint32Array(image.data.buffer);
  const scale = most > 0 ? 255 / most : 0;
  if (high === rows && wide === columns) {
    for (let i = 0; i < words.length; i++) words[i] = colours[Math.min(255, values[i] * scale) | 0];
    return image;
  }
  for (let y = 0; y < high; y++) {
    const top = Math.floor((y * rows) / high);
    const bottom = Math.max(top + 1, Math.floor(((y + 1) * rows) / high));
    for (let x = 0; x < wide; x++) {
      const left = Math.floor((x * columns) / wide);
      const right = Math.max(left + 1, Math.floor(((x + 1) * columns) / wide));
      let peak = 0;
      for (let row = top; row < bottom; row++)
        for (let at = row * columns + left; at < row * columns + right; at++) if (values[at] > peak) peak = values[at];
      words[y * wide + x] = colours[Math.min(255, peak * scale) | 0];
    }
  }
  return image;
}

/** Differences of two maps as pixels: not downsampled, because differences have two signs. */
export function changePixels(before: Field, after: Field, most: number, colours: Palette): ImageData {
  const image = new ImageData(before.columns, before.rows);
  const words = new Uint32Array(image.data.buffer);
  const scale = most > 0 ? 127.5 / most : 0;
  for (let i = 0; i < words.length; i++) {
    const change = (after.values[i] - before.values[i]) * scale + 127.5;
    words[i] = colours[Math.min(255, Math.max(0, Math.round(change)))];
  }
  return image;
}

let scratch: OffscreenCanvas | HTMLCanvasElement | null = null;

/** Draw pixels into a rectangle with hard edges. */
export function place(to: CanvasRenderingContext2D, image: ImageData, x: number, y: number, w: number, h: number): void {
  scratch ??= typeof OffscreenCanvas === "undefined" ? document.createElement("canvas") : new OffscreenCanvas(1, 1);
  if (scratch.width !== image.width || scratch.height !== image.height) {
    scratch.width = image.width;
    scratch.height = image.height;
  }
  const pen = scratch.getContext("2d") as CanvasRenderingContext2D;
  pen.putImageData(image, 0, 0);
  to.imageSmoothingEnabled = false;
  to.drawImage(scratch, x, y, w, h);
}

/** A canvas sized for the screen's real pixels; returns its context in CSS pixels. */
export function sharpen(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const wide = Math.max(1, Math.round(width * ratio));
  const high = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  const pen = canvas.getContext("2d")!;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

/** Pixels as a data: URL, for exported figures. */
export function dataUrl(image: ImageData): string {
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas.toDataURL("image/png");
}

/** Unicode isolates keep a right-to-left label from affecting its neighbours. */
export function isolate(label: string): string {
  return String.fromCharCode(0x2068) + label + String.fromCharCode(0x2069);
}
