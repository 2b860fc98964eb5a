/* An image as the model reads it: transparency on white, channels, and Pillow's bilinear resize, bit for bit. */

const BITS = 22; // of the fraction in Pillow's fixed-point weights

/** The weights of one axis: a triangle as wide as an output pixel, at least as an input pixel. */
function axis(from: number, to: number): { start: number; weights: number[] }[] {
  const scale = from / to;
  const support = Math.max(scale, 1);
  return Array.from({ length: to }, (_, at) => {
    const centre = (at + 0.5) * scale;
    const start = Math.max(0, Math.trunc(centre - support + 0.5));
    const end = Math.min(from, Math.trunc(centre + support + 0.5));
    const weights = Array.from({ length: end - start }, (_, i) =>
      Math.max(0, 1 - Math.abs((i + start - centre + 0.5) / support)),
    );
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return { start, weights: weights.map((weight) => Math.trunc((weight / sum) * 2 ** BITS + 0.5)) };
  });
}

function clip(sum: number): number {
  return Math.min(255, Math.max(0, Math.floor(sum / 2 ** BITS)));
}

/** [height, width, depth] -> [size, size, depth], first the rows, then the columns, each rounded to bytes. */
function resize(pixels: Uint8Array, width: number, height: number, depth: number, size: number): Uint8Array {
  const across = axis(width, size);
  const middle = width === size ? pixels : new Uint8Array(height * size * depth);
  if (width !== size)
    for (let y = 0; y < height; y++)
      across.forEach(({ start, weights }, x) => {
        for (let c = 0; c < depth; c++) {
          let sum = 2 ** (BITS - 1);
          weights.forEach((weight, i) => (sum += weight * pixels[(y * width + start + i) * depth + c]));
          middle[(y * size + x) * depth + c] = clip(sum);
        }
      });
  if (height === size) return middle;
  const result = new Uint8Array(size * size * depth);
  axis(height, size).forEach(({ start, weights }, y) => {
    for (let x = 0; x < size * depth; x++) {
      let sum = 2 ** (BITS - 1);
      weights.forEach((weight, i) => (sum += weight * middle[(start + i) * size * depth + x]));
      result[y * size * depth + x] = clip(sum);
    }
  });
  return result;
}

/** RGBA pixels as numbers from 0 to 1, [channels, size, size]; a grayscale image three times, as the graph reads it. */
export function asInput(rgba: Uint8ClampedArray, width: number, height: number, channels: number, size: number): Float32Array {
  const count = width * height;
  const own = new Uint8Array(count * channels);
  for (let at = 0; at < count; at++) {
    const alpha = channels === 4 ? 255 : rgba[4 * at + 3];
    const colour = [0, 1, 2].map((c) => Math.round((rgba[4 * at + c] * alpha + 255 * (255 - alpha)) / 255));
    if (channels === 1) own[at] = (colour[0] * 19595 + colour[1] * 38470 + colour[2] * 7471 + 0x8000) >> 16;
    else for (let c = 0; c < channels; c++) own[at * channels + c] = c < 3 ? colour[c] : rgba[4 * at + 3];
  }
  const small = resize(own, width, height, channels, size);
  const input = new Float32Array(Math.max(channels, 3) * size * size);
  for (let c = 0; c < Math.max(channels, 3); c++)
    for (let at = 0; at < size * size; at++) input[c * size * size + at] = small[at * channels + (c % channels)] / 255;
  return input;
}
