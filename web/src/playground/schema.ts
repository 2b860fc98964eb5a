/* OpenAPI as rows: a field of a request or a response, its type, and what is said about it. */

import { currentLanguage } from "../lib/words.svelte";

export interface Schema {
  $ref?: string;
  type?: string;
  description?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  items?: Schema;
  prefixItems?: Schema[];
  anyOf?: Schema[];
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  additionalProperties?: Schema | boolean;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
  exclusiveMaximum?: number;
}
type Content = Record<string, { schema?: Schema }>;
export interface Operation {
  method: string;
  path: string;
  tags: string[];
  description?: string;
  parameters?: { name: string; in: string; required?: boolean; schema: Schema }[];
  requestBody?: { content: Content };
  responses: Record<string, { description: string; content?: Content }>;
}
export interface OpenApi {
  info: { version: string };
  paths: Record<string, Record<string, Omit<Operation, "method" | "path">>>;
  components: { schemas: Record<string, Schema> };
}
export interface Row {
  name: string; // outputs[].label
  type: string;
  description: string;
  required: boolean;
  default?: string;
}

export async function fetchOpenApi(): Promise<OpenApi> {
  const response = await fetch("openapi.json", { headers: { "Accept-Language": currentLanguage() } });
  if (!response.ok) throw new Error(String(response.status));
  return (await response.json()) as OpenApi;
}

export function operations(api: OpenApi): Operation[] {
  return Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ ...operation, method: method.toUpperCase(), path })),
  );
}

function resolve(api: OpenApi, schema: Schema): Schema {
  if (!schema.$ref) return schema;
  const { $ref, ...rest } = schema;
  return { ...api.components.schemas[$ref.replace("#/components/schemas/", "")], ...rest };
}

/** A field that may be null means: it may be left out. */
function variants(schema: Schema): Schema[] {
  return (schema.anyOf ?? [schema]).filter((one) => one.type !== "null");
}

function limits({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }: Schema): string {
  if (minimum !== undefined && maximum !== undefined) return ` ${minimum} … ${maximum}`;
  const bounds = { "≥": minimum, ">": exclusiveMinimum, "≤": maximum, "<": exclusiveMaximum };
  const known = Object.entries(bounds).filter(([, value]) => value !== undefined);
  return known.length ? ` ${known.map(([sign, value]) => `${sign} ${value}`).join(", ")}` : "";
}

/** A type as a reader says it: "integer 1 … 64", "string or list of string". */
export function typeOf(api: OpenApi, schema: Schema): string {
  const names = variants(schema).map((one) => {
    const found = resolve(api, one);
    if (found.const !== undefined) return JSON.stringify(found.const);
    if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(" | ");
    if (found.anyOf) return typeOf(api, found);
    if (found.prefixItems) return `[${found.prefixItems.map((item) => typeOf(api, item)).join(", ")}]`;
    if (found.type === "array") return `list of ${typeOf(api, found.items ?? {})}`;
    if (found.type === "object" && typeof found.additionalProperties === "object")
      return `object of ${typeOf(api, found.additionalProperties)}`;
    return `${found.type ?? "any"}${limits(found)}`;
  });
  return [...new Set(names)].join(" or ");
}

/** The fields of a schema, those of the objects in it after them. */
export function rows(api: OpenApi, schema: Schema, prefix = ""): Row[] {
  const whole = resolve(api, schema);
  if (whole.type === "array") return rows(api, whole.items ?? {}, `${prefix}[]`);
  return Object.entries(whole.properties ?? {}).flatMap(([field, one]) => {
    const found = resolve(api, one);
    const name = prefix ? `${prefix}.${field}` : field;
    const row: Row = {
      name,
      type: typeOf(api, found),
      description: one.description ?? "",
      required: whole.required?.includes(field) ?? false,
      default: found.default === undefined || found.default === null ? undefined : JSON.stringify(found.default),
    };
    const nested = variants(found).flatMap((each) => {
      const inner = resolve(api, each);
      const fields = inner.properties ?? innermost(api, inner).properties;
      return fields ? rows(api, inner, name) : [];
    });
    return [row, ...nested.filter((each, at) => nested.findIndex((other) => other.name === each.name) === at)];
  });
}

function innermost(api: OpenApi, schema: Schema): Schema {
  return schema.type === "array" ? innermost(api, resolve(api, schema.items ?? {})) : schema;
}
