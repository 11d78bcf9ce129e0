"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const RAMP = [[0,34,78],[35,62,108],[87,93,109],[124,123,120],[164,156,115],[210,193,92],[254,232,56]];
const $ = id => document.getElementById(id);
const element = (name, text, attributes = {}) => { const e = document.createElement(name); if (text !== null) e.textContent = text; for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v); return e; };
const svg = (name, attributes) => { const e = document.createElementNS("http://www.w3.org/2000/svg", name); for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v); return e; };
const label = (text, x, y, anchor = "middle") => { const t = svg("text", { x, y, "text-anchor": anchor }); t.textContent = text; return t; };
const colour = at => { at = Math.max(0, Math.min(1, at)) * (RAMP.length - 1); const i = Math.min(RAMP.length - 2, Math.floor(at)), f = at - i; return RAMP[i].map((c, k) => Math.round(c + (RAMP[i + 1][k] - c) * f)); };
const light = rgb => { const [r, g, b] = rgb.map(c => { c /= 255; return c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
const painted = (button, rgb) => { button.style.background = `rgb(${rgb})`; button.style.color = light(rgb) > .179 ? "#000" : "#fff"; };
// what the ends of a scale mean, and its colours between them, as evenly as the values lie
const scale = (low, high, shade = at => at) => [element("span", low), element("div", null, { class: "ramp", "aria-hidden": "true", style: `background: linear-gradient(90deg, ${Array.from({ length: 17 }, (_, i) => `rgb(${colour(shade(i / 16))})`)})` }), element("span", high)];
const filled = (table, ...rows) => table.replaceChildren(...rows.map(([name, ...cells]) => { const tr = element("tr", null); tr.append(element("th", name, { scope: "row" }), ...cells.map(c => element("td", c))); return tr; }));
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -999], End: [0, 999] };
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
