// What a request asks for beside its messages. Kept in this browser, as it was typed.

import { byId, make } from "./dom.js";

const KEPT = "triptych.ui.settings";
const FIELDS = [
  ["temperature", "Temperature", 0.1, "0 always takes the likeliest token"],
  ["top_p", "Top p", 0.05, "The likeliest tokens that together have this chance"],
  ["top_k", "Top k", 1, "So many of the likeliest tokens"],
  ["min_p", "Min p", 0.01, "Tokens at least so likely, relative to the likeliest"],
  ["max_tokens", "Max tokens", 1, "The answer ends after so many"],
  ["seed", "Seed", 1, "The same seed draws the same answer"],
  ["repetition_penalty", "Repetition", 0.05, "Above 1: whatever was said already is less likely"],
  ["presence_penalty", "Presence", 0.1, "Taken off the logit of every token of the answer so far"],
  ["frequency_penalty", "Frequency", 0.1, "The same, once for each time that the token came"],
];
export const ALTERNATIVES = 5;

const form = byId("settings");

/** A setting that cannot be sent as it is. */
export class WrongSetting extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** Build the form and fill it with what was kept. */
export function startSettings() {
  for (const [name, label, step, help] of FIELDS) {
    const field = make("input", {
      id: name, name, type: "number", step, placeholder: "default",
      inputmode: Number.isInteger(step) ? "numeric" : "decimal", "aria-describedby": `${name}-help`,
    });
    byId("numbers").append(
      make("div", { title: help }, make("label", { for: name }, label), field,
        make("span", { id: `${name}-help`, class: "hidden" }, help)),
    );
  }
  restore();
  form.addEventListener("input", (event) => {
    event.target.removeAttribute("aria-invalid");
    keep();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", () => {
    for (const [name] of FIELDS) form.elements[name].value = "";
    form.elements.logprobs.checked = true;
    clearMarks();
    keep();
  });
}

export const systemPrompt = () => form.elements.system.value.trim();

/** The fields of the request. Throws WrongSetting. */
export function requestFields() {
  clearMarks();
  const fields = {};
  for (const [name, label] of FIELDS) {
    const field = form.elements[name];
    if (field.validity.badInput) throw new WrongSetting(name, `${label} is not a number.`);
    if (field.value === "") continue;
    fields[name] = Number(field.value);
  }
  if (form.elements.logprobs.checked) Object.assign(fields, { logprobs: true, top_logprobs: ALTERNATIVES });
  const tools = form.elements.tools.value.trim();
  if (tools) {
    try {
      fields.tools = JSON.parse(tools);
    } catch (error) {
      throw new WrongSetting("tools", `Tools: no JSON (${error.message}).`);
    }
  }
  return fields;
}

/** Mark the setting that an error names, such as `tools[0].function`. */
export function markWrong(param) {
  const field = form.elements[/^[a-z_]+/.exec(param ?? "")?.[0]];
  if (!field) return;
  field.setAttribute("aria-invalid", "true");
  field.closest("details")?.setAttribute("open", "");
}

function clearMarks() {
  for (const field of form.elements) field.removeAttribute("aria-invalid");
}

function keep() {
  const kept = { system: form.elements.system.value, tools: form.elements.tools.value };
  kept.logprobs = form.elements.logprobs.checked;
  for (const [name] of FIELDS) kept[name] = form.elements[name].value;
  try {
    localStorage.setItem(KEPT, JSON.stringify(kept));
  } catch {
    // storage is full or forbidden: they last as long as the page
  }
}

function restore() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return;
  }
  for (const name of ["system", "tools", ...FIELDS.map(([each]) => each)]) {
    if (typeof kept[name] === "string") form.elements[name].value = kept[name];
  }
  if (typeof kept.logprobs === "boolean") form.elements.logprobs.checked = kept.logprobs;
}
