/* Images: the browser decodes and resizes, the server gets size x size x RGB bytes. */

export async function readFile(file: File): Promise<CanvasImageSource> {
  try {
    return await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name}: this browser cannot read it as an image`);
  }
}

/** The central square of an image, as bytes for the server and as a URL for the page. */
export function toPixels(source: CanvasImageSource, size: number): { bytes: Uint8Array; url: string } {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const pen = canvas.getContext("2d", { willReadFrequently: true })!;
  const { width, height } = source as { width: number; height: number };
  const side = Math.min(width, height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(source, (width - side) / 2, (height - side) / 2, side, side, 0, 0, size, size);
  const { data } = pen.getImageData(0, 0, size, size);
  const bytes = new Uint8Array(size * size * 3);
  for (let from = 0, to = 0; from < data.length; from += 4, to += 3) bytes.set(data.subarray(from, from + 3), to);
  return { bytes, url: canvas.toDataURL("image/png") };
}

/** Bytes from the server as a URL. */
export function fromPixels(bytes: Uint8Array, size: number): string {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const image = new ImageData(size, size);
  for (let from = 0, to = 0; from < bytes.length; from += 3, to += 4) {
    image.data.set(bytes.subarray(from, from + 3), to);
    image.data[to + 3] = 255;
  }
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas.toDataURL("image/png");
}

/** An example image: a house, a tree and a sun, drawn here. */
export function drawScene(size: number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const pen = canvas.getContext("2d")!;
  const unit = size / 100;
  pen.scale(unit, unit);
  const sky = pen.createLinearGradient(0, 0, 0, 70);
  sky.addColorStop(0, "#8fc1ee");
  sky.addColorStop(1, "#e8f3fb");
  pen.fillStyle = sky;
  pen.fillRect(0, 0, 100, 100);
  pen.fillStyle = "#7fb069";
  pen.fillRect(0, 70, 100, 30);
  pen.fillStyle = "#f6c445";
  disc(pen, 80, 20, 10);
  pen.fillStyle = "#d9725b";
  pen.fillRect(14, 46, 34, 30);
  pen.fillStyle = "#7a3b3b";
  pen.beginPath();
  pen.moveTo(9, 47);
  pen.lineTo(31, 26);
  pen.lineTo(53, 47);
  pen.fill();
  pen.fillStyle = "#fbe9c8";
  pen.fillRect(19, 52, 9, 9);
  pen.fillStyle = "#5b4636";
  pen.fillRect(34, 58, 9, 18);
  pen.fillRect(73, 56, 5, 22);
  pen.fillStyle = "#3f7d4e";
  disc(pen, 75, 50, 13);
  disc(pen, 67, 56, 8);
  disc(pen, 83, 57, 8);
  return canvas;
}

function disc(pen: CanvasRenderingContext2D, x: number, y: number, radius: number): void {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}
