// Greedy outputs of exported folders with transformers.js:  node generate.mjs FOLDER CLASS TOKENS TEXT …
// FOLDER is the folder that contains the exported one, which is called "model". Prints the ids of each text as JSON.
import * as transformers from "@huggingface/transformers";

const [folder, kind, tokens, ...texts] = process.argv.slice(2);
transformers.env.allowRemoteModels = false;
transformers.env.localModelPath = folder;
const tokenizer = await transformers.AutoTokenizer.from_pretrained("model");
const model = await transformers[kind].from_pretrained("model");
const rows = [];
for (const text of texts) {
  const inputs = tokenizer([text]);
  const logits = kind.includes("Classification");
  const output = logits ? (await model(inputs)).logits : await model.generate({ ...inputs, max_new_tokens: Number(tokens) });
  rows.push(output.tolist()[0].map(Number));
}
console.log(JSON.stringify(rows));
