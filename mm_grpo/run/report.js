"use strict";
// What a reader does on report.html: filters, pages and keys of the gallery, and values under the pointer in the curves.
// Text of a run is only ever put into text nodes and attributes by name, never parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6 ? value.toExponential(1) : String(+value.toPrecision(4));
}

// pictures ------------------------------------------------------------------------------------

function picture(name, label, marks) {
  if (!(name in data.pictures)) return null;
  const [width, height] = data.pictures[name];
  if (!find("p-" + name)) {
    const uri = find("u-" + name).textContent;
    find("pictures").append(svg("image", { id: "p-" + name, width, height, preserveAspectRatio: "none", href: uri }));
  }
  const made = svg("svg", { class: width < 160 ? "picture small" : "picture", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  made.append(svg("use", { href: "#p-" + name }));
  for (const [mark, kind, place] of marks) {
    for (const look of ["halo", "mark"]) {
      const title = svg("title", {});
      title.textContent = mark.label;
      const [x, y] = mark.points[0];
      const at = mark.points.length === 1 ? { d: `M${x} ${y}h0` } : { points: mark.points.map((p) => p.join(",")).join(" ") };
      const look_of = `${look} ${kind}${at.d ? " point" : ""}`;
      made.append(svg(at.d ? "path" : "polygon", { class: look_of, "data-of": place, ...at }, title));
    }
  }
  return made;
}

function pictures(row, completions) {
  const made = el("div", { class: "pictures" });
  let drawn = row.gold.length > 0;
  row.images.forEach((name, i) => {
    const marks = [];
    completions.forEach((one, place) => {
      for (const mark of one.marks || []) if (mark.image === i) marks.push([mark, "predicted", place]);
    });
    for (const mark of row.gold) if (mark.image === i) marks.push([mark, "gold", -1]);
    drawn = drawn || marks.length > 0;
    made.append(picture(name, `image ${i + 1} of ${row.uid}`, marks) || "");
  });
  if (drawn) {
    const key = (kind) => el("span", {}, el("i", { class: "swatch " + kind }), " " + kind);
    made.append(el("div", { class: "legend" }, key("gold"), key("predicted")));
  }
  return made;
}

// cards ---------------------------------------------------------------------------------------

function texts(row) {
  const made = row.messages.map((message) =>
    el("p", { class: "message", dir: "auto" }, row.messages.length > 1 ? el("span", { class: "role" }, message.role) : null, message.text));
  for (const [column, value] of Object.entries(row.answers)) {
    made.push(el("p", { class: "answer", dir: "auto" }, el("span", {}, column), value));
  }
  return made;
}

// A text, or its tokens with their sight: [text, nats, level].
function words_of(one, which) {
  const pieces = one["shaded_" + which];
  if (!pieces) return el("div", { class: "text", dir: "auto" }, one[which] || "");
  return el("div", { class: "text", dir: "auto" }, ...pieces.map(([text, nats, level]) => (level
    ? el("span", { class: `sight ${level > 0 ? "g" : "n"}${Math.abs(level)}`, title: `${nats < 0 ? "" : "+"}${nats.toFixed(2)} nats` }, text)
    : text)));
}

function completion(one) {
  const scores = el("div", { class: "scores" }, el("span", { class: "reward" }, number(one.reward)),
    el("span", { class: "advantage", title: "advantage" }, one.tone === "flat" ? "" : one.signed));
  for (const [part, score] of Object.entries(one.parts || {})) scores.append(el("span", { class: "part" }, `${part} ${number(score)}`));
  scores.append(el("span", { class: "part" }, `${one.end ? one.end + ", " : ""}${one.tokens} tokens`));
  if (one.sight) scores.append(el("span", { class: "part", title: `against the images of row ${one.sight.other}` }, `sight ${number(one.sight.nats)} nats`));
  if (one.masked) scores.append(el("span", { class: "part" }, `not learned from: ${one.masked}`));
  const body = el("div", {});
  for (const turn of one.turns || []) {
    body.append(el("div", { class: "turn" }, el("span", { class: "role" }, turn.head),
      turn.tone ? el("div", { class: `scores ${turn.tone} a${turn.strength}` }, el("span", { class: "reward", title: "reward of the turn" }, number(turn.reward)),
        el("span", { class: "advantage", title: "advantage of the turn" }, turn.tone === "flat" ? "" : turn.signed)) : null,
      words_of(turn, "text"),
      ...turn.images.map((name, i) => picture(name, `image ${i + 1} of ${turn.head}`, []))));
  }
  if (!one.turns) {
    if (one.thinking) {
      body.append(el("details", { class: "thinking" }, el("summary", {}, `thinking, ${one.thinking.length} characters`), words_of(one, "thinking")));
    }
    body.append(words_of(one, "text"));
  }
  return el("li", { class: `completion ${one.tone} a${one.strength}` }, scores, body);
}

function list(completions) {
  return el("ol", { class: "completions" }, ...completions.map(completion));
}

function ends(row) {
  const sides = ["before", "after"].filter((when) => row[when]);
  return el("div", { class: "versus" }, ...sides.map((when) => el("div", {}, el("h3", {}, `step ${row[when + "_step"]}`), list(row[when]))));
}

function card(row) {
  const evaluation = "set" in row;
  const completions = evaluation ? [...(row.before || []), ...(row.after || [])] : row.completions;
  const head = el("div", { class: "group-head" }, data.runs.length > 1 ? el("b", {}, data.runs[row.run]) : null);
  const body = el("div", {}, ...texts(row));
  if (evaluation) {
    head.append(el("b", {}, `evaluation ${row.set}`));
    body.append(ends(row));
    if (row.blind) {
      const shown = row.blind.images.map((name, i) => picture(name, `image ${i + 1} in place of those of ${row.uid}`, [])).filter(Boolean);
      body.append(el("div", { class: "blind" }, el("h3", {}, `images ${row.blind.kind}`),
        shown.length ? el("div", { class: "pictures" }, ...shown) : null, ends(row.blind)));
    }
  } else {
    head.append(el("b", {}, `step ${row.step}`), el("span", {}, `slot ${row.slot}${row.attempt ? `, attempt ${row.attempt}` : ""}`));
    body.append(list(row.completions));
    if (row.left_out) body.append(el("p", { class: "soft" }, `and ${row.left_out} more in the rollout log`));
  }
  head.append(el("span", {}, `row ${row.uid}`));
  const side = row.images.length ? pictures(row, completions) : null;
  const made = el("article", { class: evaluation ? "group evaluation" : "group", tabindex: "-1" }, head,
    el("div", { class: row.images.length ? "group-body" : "group-body bare" }, side, body));
  made.querySelectorAll(".completion").forEach((item, place) => {
    const choose = (on) => made.querySelectorAll(".pictures svg.picture").forEach((shown) => {
      shown.classList.toggle("chosen", on && !!shown.querySelector(`[data-of="${place}"]`));
      shown.querySelectorAll(`[data-of="${place}"]`).forEach((mark) => mark.classList.toggle("chosen", on));
    });
    item.addEventListener("pointerenter", () => choose(true));
    item.addEventListener("pointerleave", () => choose(false));
  });
  return made;
}

// filters, pages, keys ------------------------------------------------------------------------

const state = { page: 0, current: -1, shown: [] };
const value = (id) => (find(id) ? find(id).value.trim() : "");
const words = new Map();

function answers_of(row) {
  const blind = row.blind || {};
  return [...(row.completions || []), ...[row.before, row.after, blind.before, blind.after].flatMap((given) => given || [])];
}

function text_of(row) {
  if (!words.has(row)) {
    const answers = answers_of(row);
    const parts = [row.messages.map((m) => m.text), Object.values(row.answers), answers.map((one) => [one.thinking, one.text, (one.turns || []).map((t) => [t.head, t.text])])];
    words.set(row, parts.flat(4).filter(Boolean).join("\n").toLowerCase());
  }
  return words.get(row);
}

function filtered() {
  const kind = value("f-kind") || (data.groups.length ? "groups" : "evaluations");
  const [from, to] = (value("f-step").match(/^(\d+)(?:\s*[-–]\s*(\d+))?$/) || []).slice(1).map((text) => (text === undefined ? null : Number(text)));
  const bound = (id) => (value(id) === "" || Number.isNaN(Number(value(id))) ? null : Number(value(id)));
  const low = bound("f-low"), high = bound("f-high"), uid = value("f-uid").toLowerCase(), text = value("f-text").toLowerCase(), run = value("f-run"), sight = value("f-sight");
  const step_fits = (step) => step >= from && step <= (to === null || to === undefined ? from : to);
  return data[kind].filter((row) => {
    if (sight !== "" && !answers_of(row).some((one) => one.sight)) return false;
    if (run !== "" && row.run !== Number(run)) return false;
    if (from !== undefined && ![row.step, row.before_step, row.after_step].some((step) => step !== undefined && step_fits(step))) return false;
    if (uid && !row.uid.toLowerCase().includes(uid)) return false;
    if (low !== null || high !== null) {
      const answers = row.completions || [...(row.before || []), ...(row.after || [])];
      const fits = (reward) => reward !== null && (low === null || reward >= low) && (high === null || reward <= high);
      if (!answers.some((one) => fits(one.reward === undefined ? null : one.reward))) return false;
    }
    return !text || text_of(row).includes(text);
  });
}

function show() {
  const start = state.page * data.page;
  const rows = state.shown.slice(start, start + data.page);
  find("groups").replaceChildren(...rows.map(card));
  state.current = -1;
  const end = start + rows.length;
  find("status").textContent = rows.length ? `${start + 1} to ${end} of ${state.shown.length}` : "nothing fits these filters";
  find("previous").disabled = state.page === 0;
  find("next").disabled = end >= state.shown.length;
}

function filter() {
  state.shown = filtered();
  state.page = 0;
  show();
}

function turn(pages) {
  const last = Math.max(0, Math.ceil(state.shown.length / data.page) - 1);
  const page = Math.min(last, Math.max(0, state.page + pages));
  if (page === state.page) return false;
  state.page = page;
  show();
  return true;
}

function go(by) {
  const cards = () => [...find("groups").querySelectorAll(".group")];
  let place = state.current + by;
  if (place >= cards().length && turn(1)) place = 0;
  else if (place < 0 && state.current >= 0 && turn(-1)) place = cards().length - 1;
  const all = cards();
  if (!all.length) return;
  state.current = Math.min(all.length - 1, Math.max(0, place));
  all.forEach((each, i) => each.classList.toggle("current", i === state.current));
  all[state.current].focus({ preventScroll: true });
  all[state.current].scrollIntoView({ block: "center" });
}

function fold() {
  const cards = [...find("groups").querySelectorAll(".group")];
  const folded = [...(cards[state.current] || find("groups")).querySelectorAll("details.thinking")];
  const open = folded.some((each) => !each.open);
  folded.forEach((each) => { each.open = open; });
}

const KEYS = {
  j: () => go(1),
  k: () => go(-1),
  n: () => { if (turn(1)) find("groups").scrollIntoView(); },
  p: () => { if (turn(-1)) find("groups").scrollIntoView(); },
  t: fold,
  e: () => { const kind = find("f-kind"); if (kind) { kind.selectedIndex = 1 - kind.selectedIndex; filter(); } },
  c: () => find("filters").reset(),
  "/": () => find("f-text").focus(),
};

if (find("filters")) {
  for (const id of ["filters", "keys", "pager"]) find(id).hidden = false;
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("input", filter);
  find("filters").addEventListener("reset", () => setTimeout(filter));
  find("previous").addEventListener("click", () => turn(-1));
  find("next").addEventListener("click", () => turn(1));
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  filter();
}

// curves --------------------------------------------------------------------------------------

document.querySelectorAll("figure").forEach((figure, i) => {
  const chart = figure.querySelector("svg"), readout = figure.querySelector(".readout"), lines = data.charts[i];
  const [x_low, x_high] = chart.dataset.x.split(" ").map(Number);
  const axis = chart.querySelector(".axis"), left = axis.x1.baseVal.value, right = axis.x2.baseVal.value, floor = axis.y1.baseVal.value;
  const cursor = svg("line", { class: "cursor", y1: 10, y2: floor, visibility: "hidden" });
  chart.append(cursor);
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const step = x_low + ((Math.min(right, Math.max(left, at)) - left) / (right - left)) * (x_high - x_low);
    const nearest = (points) => points.reduce((best, point) => (point[1] !== null && (!best || Math.abs(point[0] - step) < Math.abs(best[0] - step)) ? point : best), null);
    const found = lines.map((line) => [line.label, nearest(line.points)]).filter(([, point]) => point);
    if (!found.length) return;
    const x = left + ((found[0][1][0] - x_low) / (x_high - x_low)) * (right - left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    readout.textContent = `step ${number(found[0][1][0])}: ` + found.map(([label, point]) => (found.length > 1 ? `${label} ` : "") + number(point[1])).join(", ");
  });
  chart.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; });
});
