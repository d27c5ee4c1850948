/** A run spec's schema as a flat list of fields with their bounds in words, for help and for changing single settings. */

import type { SpecSchema } from "../api/types";

export interface SpecField {
  /** As in YAML: `update.clip_range`, `reward.sources[].kind`. */
  path: string;
  group: string;
  type: string;
  bounds: string;
  /** The values to choose from, where there are few. */
  choices: unknown[] | null;
  default: string | null;
  required: boolean;
  description: string;
  changeable: string | null;
}

export function schemaFields(schema: SpecSchema): SpecField[] {
  return fieldsOf(schema, schema, "", "");
}

function fieldsOf(root: SpecSchema, node: SpecSchema, prefix: string, group: string): SpecField[] {
  return Object.entries(node.properties ?? {}).flatMap(([name, raw]) => {
    const path = prefix ? `${prefix}.${name}` : name;
    const own = group || (inner(root, raw).node.properties ? name : "");
    const { node: target, list } = inner(root, raw);
    const below = target.properties ? fieldsOf(root, target, list ? `${path}[]` : path, own) : [];
    if (below.length) return below;
    return [
      {
        path,
        group: own,
        type: typeWords(root, raw),
        bounds: boundWords(raw),
        choices: choicesOf(root, raw),
        default: "default" in raw ? JSON.stringify(raw.default) : null,
        required: (node.required ?? []).includes(name),
        description: raw.description ?? "",
        changeable: raw.changeable ?? null,
      },
    ];
  });
}

/** Through references, `X or null`, and lists, to what holds the properties. */
function inner(root: SpecSchema, node: SpecSchema): { node: SpecSchema; list: boolean } {
  if (node.$ref) return inner(root, root.$defs?.[node.$ref.replace("#/$defs/", "")] ?? {});
  const choices = (node.anyOf ?? []).filter((choice) => choice.type !== "null");
  if (choices.length === 1 && choices[0]) return inner(root, choices[0]);
  if (node.type === "array" && node.items) return { node: inner(root, node.items).node, list: true };
  return { node, list: false };
}

function typeWords(root: SpecSchema, node: SpecSchema): string {
  if (node.$ref) return typeWords(root, root.$defs?.[node.$ref.replace("#/$defs/", "")] ?? {});
  if (node.enum) return node.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (node.const !== undefined) return JSON.stringify(node.const);
  if (node.anyOf) return node.anyOf.map((choice) => typeWords(root, choice)).join(" or ");
  if (node.type === "array") return `list of ${node.items ? typeWords(root, node.items) : "anything"}`;
  return { integer: "whole number", string: "text", boolean: "true or false" }[node.type ?? ""] ?? node.type ?? "";
}

function choicesOf(root: SpecSchema, node: SpecSchema): unknown[] | null {
  if (node.$ref) return choicesOf(root, root.$defs?.[node.$ref.replace("#/$defs/", "")] ?? {});
  if (node.enum) return node.enum;
  if (node.const !== undefined) return [node.const];
  if (node.type === "boolean") return [true, false];
  if (node.type === "null") return [null];
  if (!node.anyOf) return null;
  const parts = node.anyOf.map((choice) => choicesOf(root, choice));
  return parts.includes(null) ? null : parts.flatMap((part) => part ?? []);
}

function boundWords(node: SpecSchema): string {
  const bound = [node, ...(node.anyOf ?? [])].find(
    (part) => part.minimum !== undefined || part.maximum !== undefined || part.exclusiveMinimum !== undefined || part.exclusiveMaximum !== undefined,
  );
  if (!bound) return "";
  const words: string[] = [];
  if (bound.minimum !== undefined) words.push(`≥ ${bound.minimum}`);
  if (bound.exclusiveMinimum !== undefined) words.push(`> ${bound.exclusiveMinimum}`);
  if (bound.maximum !== undefined) words.push(`≤ ${bound.maximum}`);
  if (bound.exclusiveMaximum !== undefined) words.push(`< ${bound.exclusiveMaximum}`);
  return words.join(", ");
}

/** Fields that hold every word of the search, in path or description. */
export function searchFields(fields: SpecField[], search: string): SpecField[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return fields.filter((field) => {
    const text = `${field.path} ${field.description}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}
