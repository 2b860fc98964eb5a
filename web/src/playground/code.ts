/* The same request from a program. The key is read from the environment: it belongs in no script. */

import type { Call } from "./tasks";

export const FORMS = ["curl", "Python", "JavaScript"] as const;
export type Form = (typeof FORMS)[number];

export function writeCall(form: Form, call: Call, key: boolean): string {
  const url = new URL(call.path, location.href).href.replace(/#.*$/, "");
  return { curl, Python: python, JavaScript: javascript }[form](url, call.body, key);
}

// The body comes from standard input: no shell changes it, and it may be longer than a command line.
function curl(url: string, body: object, key: boolean): string {
  const stream = "stream" in body ? " --no-buffer" : "";
  const auth = key ? `  -H "Authorization: Bearer $REGARD_API_KEY" \\\n` : "";
  return `curl${stream} '${url}' \\\n${auth}  -H 'Content-Type: application/json' --data-binary @- <<'JSON'\n${json(body)}\nJSON\n`;
}

function python(url: string, body: object, key: boolean): string {
  const auth = key ? `, "Authorization": f"Bearer {os.environ['REGARD_API_KEY']}"` : "";
  const texts = several(body) ? `texts = [""] * body["n"]\n` : "";
  const each = texts ? `texts[choice["index"]] += choice["text"]` : `print(choice["text"], end="", flush=True)`;
  const read =
    "stream" in body
      ? `    for line in response:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                ${each}${texts && `\nprint(*texts, sep="\\n\\n")`}`
      : `    print(json.dumps(json.load(response), indent=2, ensure_ascii=False))`;
  return `import json
${key ? "import os\n" : ""}from urllib.request import Request, urlopen

body = ${literal(body)}
headers = {"Content-Type": "application/json"${auth}}
${texts}with urlopen(Request("${url}", json.dumps(body).encode(), headers)) as response:
${read}
`;
}

function javascript(url: string, body: object, key: boolean): string {
  const auth = key ? ", Authorization: `Bearer ${process.env.REGARD_API_KEY}`" : "";
  const texts = several(body) ? `const texts = Array(body.n).fill("");\n` : "";
  const each = texts ? `texts[choice.index] += choice.text` : `process.stdout.write(choice.text)`;
  const read =
    "stream" in body
      ? `${texts}let rest = "";
for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + part).split("\\n");
  rest = lines.pop();
  for (const line of lines.filter((one) => one.startsWith("data: {")))
    for (const choice of JSON.parse(line.slice(6)).choices) ${each};
}${texts && `\nconsole.log(texts.join("\\n\\n"));`}`
      : `console.log(JSON.stringify(await response.json(), null, 2));`;
  return `const body = ${json(body)};
const response = await fetch("${url}", {
  method: "POST",
  headers: { "Content-Type": "application/json"${auth} },
  body: JSON.stringify(body),
});
${read}
`;
}

/** Several samples arrive token by token in turn. */
function several(body: { n?: number }): boolean {
  return (body.n ?? 1) > 1;
}

/** JSON, one field per line. */
function json(body: object): string {
  const fields = Object.entries(body).map(([name, value]) => `  ${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  return `{\n${fields.join(",\n")}\n}`;
}

/** A value as Python writes it; strings of JSON are strings of Python too. */
function literal(value: unknown, depth = 0): string {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map((one) => literal(one, 1)).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const fields = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, 1)}`);
  return depth ? `{${fields.join(", ")}}` : `{\n${fields.map((field) => `    ${field},\n`).join("")}}`;
}
