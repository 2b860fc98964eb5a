// ONNX Runtime as WebAssembly, which the pages install anyway (14 MB), in place of its native library (290 MB).
const { join } = require("node:path");
const { pathToFileURL } = require("node:url");

const folder = join(__dirname, "../../../web/node_modules/onnxruntime-web");
const runtime = require(folder);
runtime.env.wasm.wasmPaths = pathToFileURL(join(folder, "dist/")).href;
runtime.env.wasm.numThreads = 1;
module.exports = runtime;
