"use strict";
// Draws the page from its data: `run` is the page of one or several runs, `check` that of `mm-grpo check --page`.
// Text of a run is only ever put into text nodes and attributes by name, never parsed as HTML.
const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const find = (id) => document.getElementById(id);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "" && child !== false));
  return made;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const title = (text) => svg("title", {}, text);

// words ---------------------------------------------------------------------------------------

function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "–" : String(value);
  const size = Math.abs(value), short = (x) => String(+x.toPrecision(4));
  if (value === 0) return "0";
  if (size >= 1e6) return short(value / 1e6) + "M";
  if (size >= 1e4) return short(value / 1e3) + "k";
  return size < 1e-4 ? value.toExponential(1) : short(value);
}

const signed = (value, text) => (value < 0 ? "" : "+") + text;
const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const pair = (row, name) => (known(row[name + "_low"]) ? [row[name + "_low"], row[name + "_high"]] : null);
const known = (value) => value !== null && value !== undefined;

// A score, in per cent where it is a share; a difference of two, then in points.
const score = (value, share) => (known(value) && share ? (100 * value).toFixed(1) + "%" : number(value));
const difference = (value, share) => signed(value, share ? (100 * value).toFixed(1) : number(value));
const points = (value, share) => difference(value, share) + (share ? " points" : "");
const span = (ends, share, word) => (ends ? ends.map((end) => word(end, share)).join(" to ") : "–");

function duration(seconds) {
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// charts --------------------------------------------------------------------------------------

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [460, 230, 58, 446, 10, 190];
const MOST_DOTS = 60, SMOOTH_FROM = 20, IN_VIEW = 6;

// Round numbers, 1, 2 or 5 times a power of ten apart, from at or below `low` to at or above `high`.
function ticks(low, high, most, whole) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const nice = [1, 2, 5, 10].map((m) => m * power).find((step) => rough <= step * (1 + 1e-9));
  const step = whole ? Math.max(1, nice) : nice;
  const from = Math.floor(low / step + 1e-9), to = Math.ceil(high / step - 1e-9);
  return Array.from({ length: Math.min(to - from, 20) + 1 || 0 }, (_, i) => +((from + i) * step).toPrecision(12));
}

// The ends of the y axis: never equal, and with all values between; a limit of null is as high as the values.
function ends_of(low, high, limits) {
  if (limits) {
    const [from, to] = [Math.min(low, limits[0]), limits[1] === null ? high : Math.max(high, limits[1])];
    return [from, to > from ? to : from + 1];
  }
  if (low === high) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(low) * 0.1 || 0.5)];
  return low >= 0 && low <= (high - low) * 2 ? [0, high] : [low, high];
}

function running_mean(line, width) {
  const half = (width - 1) / 2;
  return line.map(([x], i) => {
    const near = line.slice(Math.max(0, i - half), i + half + 1).map((point) => point[1]).filter(known);
    return [x, near.length ? near.reduce((a, b) => a + b) / near.length : null];
  });
}

const run_look = (run) => `s${run % 6 + 1}`;

// What is drawn of a chart: of a long run the means over its points, of a smooth one the running mean.
function lines_of(chart) {
  const several = data.runs.length > 1, DASHES = ["", " dashed", " dotted"];
  const drawn = chart.lines.flatMap(({ label, points: all, means, width, run }, i) => {
    const place = chart.lines.slice(0, i).filter((line) => line.run === run).length;  // of several runs each has one colour
    const look = several ? run_look(run) + DASHES[place % 3] : `s${i % 6 + 1}${i % 12 < 6 ? "" : " dashed"}`;
    const both = (faint, name, mean) => (several ? [{ label, look, points: mean }]
      : [{ label: faint, look: look + " faint", points: all }, { label: name, look, points: mean }]);
    if (means) return both(`${label}, lowest and highest`, `${label}, mean of ${width} steps`, means);
    if (!chart.smooth || all.length < SMOOTH_FROM) return [{ label, look, points: all }];
    const wide = Math.max(5, Math.floor(all.length / 20) | 1);
    return both("each step", `mean of ${wide} steps`, running_mean(all, wide));
  });
  return [...drawn, ...chart.expected.map((line) => ({ ...line, look: "expected" }))];
}

function figure(chart, events) {
  const lines = lines_of(chart), all = lines.flatMap((line) => line.points.filter((point) => known(point[1])));
  const [[first, last], [lowest, highest]] = [0, 1].map((i) =>
    all.reduce(([least, most], point) => [Math.min(least, point[i]), Math.max(most, point[i])], [Infinity, -Infinity]));
  const ends = ends_of(lowest, highest, chart.limits), levels = ticks(...ends, 5);
  const [x_low, x_high] = first === last ? [first - 1, last + 1] : [first, last];
  const low = Math.min(ends[0], levels[0]), high = Math.max(ends[1], levels.at(-1));
  const px = (x) => +(LEFT + ((x - x_low) / (x_high - x_low)) * (RIGHT - LEFT)).toFixed(1);
  const py = (y) => +(BOTTOM - ((y - low) / (high - low)) * (BOTTOM - TOP)).toFixed(1);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${chart.title} by step` },
    levels.map((y) => [svg("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: py(y), y2: py(y) }),
      svg("text", { class: "end", x: LEFT - 8, y: py(y) + 3.5 }, number(y))]),
    svg("line", { class: "axis", x1: LEFT, x2: RIGHT, y1: BOTTOM, y2: BOTTOM }),
    ticks(x_low, x_high, 6, true).filter((x) => x >= x_low && x <= x_high)
      .map((x) => svg("text", { class: "mid", x: px(x), y: BOTTOM + 16 }, number(x))),
    svg("text", { class: "mid", x: (LEFT + RIGHT) / 2, y: HEIGHT - 6 }, "step"),
    events.filter((event) => event.step >= x_low && event.step <= x_high).map((event) =>
      svg("line", { class: "event", x1: px(event.step), x2: px(event.step), y1: TOP, y2: BOTTOM }, title(`step ${event.step}: ${event.name}: ${event.message}`))));
  const under = (line) => (line.look === "expected" ? 0 : 1);
  for (const { label, look, points: line } of [...lines].sort((a, b) => under(a) - under(b))) {
    let stretch = [];
    for (const [x, y] of [...line, [0, null]]) {  // a null breaks the line
      if (known(y)) stretch.push(`${px(x)},${py(y)}`);
      else if (stretch.length) {
        if (stretch.length > 1) drawing.append(svg("polyline", { class: `line ${look}`, points: stretch.join(" ") }));
        stretch = [];
      }
    }
    if (line.length > MOST_DOTS || look.endsWith("faint")) continue;
    for (const [x, y] of line) if (known(y)) drawing.append(svg("circle", { class: look, cx: px(x), cy: py(y), r: 3 }, title(`${label}, step ${number(x)}: ${number(y)}`)));
  }
  const readout = el("div", { class: "readout", "aria-hidden": "true" });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: BOTTOM, visibility: "hidden" });
  drawing.append(cursor);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * WIDTH;
    const step = x_low + ((Math.min(RIGHT, Math.max(LEFT, at)) - LEFT) / (RIGHT - LEFT)) * (x_high - x_low);
    const nearest = (line) => line.reduce((best, point) => (known(point[1]) && (!best || Math.abs(point[0] - step) < Math.abs(best[0] - step)) ? point : best), null);
    const found = lines.map((line) => [line.label, nearest(line.points)]).filter(([, point]) => point);
    fill(cursor, { x1: px(found[0][1][0]), x2: px(found[0][1][0]), visibility: "visible" }, []);
    readout.textContent = `step ${number(found[0][1][0])}: ` + found.map(([label, point]) => (found.length > 1 ? `${label} ` : "") + number(point[1])).join(", ");
  });
  drawing.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); readout.textContent = ""; });
  const key = lines.length > 1 ? lines.map(({ label, look }) => el("span", { class: "key" }, el("i", { class: look }), label)) : [];
  return el("figure", {}, el("figcaption", {}, el("span", {}, chart.title, " ", el("span", { class: "unit" }, chart.unit)), key), drawing, readout);
}

// pictures and overlays -----------------------------------------------------------------------

// A picture at its pixels; `overlays` are [{label, points}, kind, place of the completion].
function picture(name, label, overlays) {
  if (!(name in data.pictures)) return null;
  const [width, height] = data.pictures[name];
  if (!find("p-" + name)) {
    const href = find("u-" + name).textContent;
    find("pictures").append(svg("image", { id: "p-" + name, width, height, preserveAspectRatio: "none", href }));
  }
  const made = svg("svg", { class: width < 160 ? "picture small" : "picture", width, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    svg("use", { href: "#p-" + name }));
  for (const [overlay, kind, place] of overlays) {
    const ends = overlay.points || [];
    if (!ends.length || !ends.flat().every(Number.isFinite)) continue;
    const at = ends.length === 1 ? { d: `M${ends[0].join(" ")}h0` } : { points: ends.join(" ") };
    for (const look of ["halo", "overlay"]) {
      made.append(svg(at.d ? "path" : "polygon", { class: `${look} ${kind}${at.d ? " point" : ""}`, "data-of": place, ...at }, title(overlay.label)));
    }
  }
  return made;
}

function pictures(row, completions) {
  const of_image = (i) => [
    ...completions.flatMap((one, place) => (one.marks || []).filter((each) => each.image === i).map((each) => [each, "predicted", place])),
    ...row.gold.filter((each) => each.image === i).map((each) => [each, "gold", -1])];
  const key = (kind) => el("span", {}, el("i", { class: "swatch " + kind }), " " + kind);
  return el("div", { class: "pictures" }, row.images.map((name, i) => picture(name, `image ${i + 1} of ${row.uid}`, of_image(i))),
    (row.gold.length > 0 || completions.some((one) => one.marks)) && el("div", { class: "legend" }, key("gold"), key("predicted")));
}

// The frames of a video with their times.
function strip(video, label) {
  return el("div", { class: "scroll strip", tabindex: 0, role: "group", "aria-label": label }, video.frames.map((name, i) =>
    el("div", {}, picture(name, `frame ${i + 1} of ${label}`, []), el("span", { class: "soft" }, `${number(video.times[i])} s`))));
}

const strips = (videos, of) => videos.map((video, i) => strip(video, `video ${i + 1} of ${of}`));

// groups and evaluation rows ------------------------------------------------------------------

// Nats from which a token has the shade 1, 2, ...; below 0 the images of the other row make it likelier.
const SHADES = [0.1, 0.5, 1, 3], AGAINST = [0.1, 1];
const shade = (nats) => (nats < 0 ? "n" + AGAINST.filter((from) => -nats >= from).length : "g" + SHADES.filter((from) => nats >= from).length);
const plain = (text) => (Array.isArray(text) ? text.map((piece) => (Array.isArray(piece) ? piece[0] : piece)).join("") : text || "");

// A text, or its pieces, of which those with nats are tokens with their sight.
function text_box(text) {
  if (!plain(text)) return el("div", { class: "text soft" }, "(empty)");
  return el("div", { class: "text", dir: "auto" }, Array.isArray(text) ? text.map((piece) => (Array.isArray(piece)
    ? el("span", { class: "sight " + shade(piece[1]), title: `${signed(piece[1], piece[1].toFixed(2))} nats` }, piece[0]) : piece)) : text);
}

function texts(row) {
  return [...row.messages.map((message) =>
    el("p", { class: "message", dir: "auto" }, row.messages.length > 1 && el("span", { class: "role" }, message.role), message.text)),
  ...Object.entries(row.answers).map(([column, value]) => el("p", { class: "answer", dir: "auto" }, el("span", {}, column), value))];
}

// Reward and advantage; the colour is as strong as the advantage is beside the `largest` of the group.
function scores(one, largest, of, ...more) {
  const advantage = one.advantage || 0, tone = advantage > 0 ? "up" : advantage < 0 ? "down" : "flat";
  const strength = largest ? Math.round((3 * Math.abs(advantage)) / largest) : 0;
  return el("div", { class: `scores ${tone} a${strength}` }, el("span", { class: "reward", title: "reward" + of }, number(one.reward)),
    el("span", { class: "advantage", title: "advantage" + of }, advantage ? signed(advantage, advantage.toFixed(2)) : ""), more);
}

function turn_head(turn) {
  const value = (given) => (typeof given === "string" ? given : JSON.stringify(given));
  const given = Object.entries(turn.arguments || {}).map(([name, each]) => `${name}=${value(each)}`).join(", ");
  return (turn.role === "tool" ? `${turn.name}(${given})` : turn.role) + (turn.fault ? `, ${turn.fault}` : "");
}

function completion(one, largest) {
  const part = (text, attributes) => el("span", { class: "part", ...attributes }, text);
  const side = scores(one, largest, "", Object.entries(one.parts || {}).map(([name, value]) => part(`${name} ${number(value)}`)),
    part(`${one.finish_reason ? one.finish_reason + ", " : ""}${one.tokens || 0} tokens`),
    one.sight && part(`sight ${number(one.sight.nats)} nats`, { title: `against the images of row ${one.sight.other}` }),
    one.masked && part(`not learned from: ${one.masked}`));
  const body = one.turns ? one.turns.map((turn) => el("div", { class: "turn" }, el("span", { class: "role" }, turn_head(turn)),
    "advantage" in turn && scores(turn, largest, " of the turn"), (turn.text || !(turn.images.length + turn.videos.length)) && text_box(turn.text), strips(turn.videos, turn_head(turn)),
    turn.images.map((name, i) => picture(name, `image ${i + 1} of ${turn_head(turn)}`, []))))
    : [one.thinking && el("details", { class: "thinking" }, el("summary", {}, `thinking, ${plain(one.thinking).length} characters`), text_box(one.thinking)),
      text_box(one.text)];
  return el("li", { class: "completion" }, side, el("div", {}, body));
}

function list(completions) {
  const largest = Math.max(0, ...completions.flatMap((one) => [one, ...(one.turns || [])]).map((each) => Math.abs(each.advantage || 0)));
  return el("ol", { class: "completions" }, completions.map((one) => completion(one, largest)));
}

function ends(row) {
  return el("div", { class: "versus" }, ["before", "after"].filter((when) => row[when])
    .map((when) => el("div", {}, el("h3", {}, `step ${row[when + "_step"]}`), list(row[when]))));
}

function card(row) {
  const evaluation = "set" in row;
  const completions = evaluation ? [...(row.before || []), ...(row.after || [])] : row.completions;
  const made = el("article", { class: evaluation ? "group evaluation" : "group" },
    el("div", { class: "group-head" }, data.runs.length > 1 && el("b", {}, data.runs[row.run].name),
      evaluation ? el("b", {}, `evaluation ${row.set}`) : [el("b", {}, `step ${row.step}`), el("span", {}, `slot ${row.slot}${row.attempt ? `, attempt ${row.attempt}` : ""}`)],
      el("span", {}, `row ${row.uid}`)), strips(row.videos, row.uid),
    el("div", { class: row.images.length ? "group-body" : "group-body bare" }, row.images.length > 0 && pictures(row, completions),
      el("div", {}, texts(row), evaluation ? ends(row) : list(row.completions),
        row.left_out > 0 && el("p", { class: "soft" }, `and ${row.left_out} more in the rollout log`))));
  made.querySelectorAll(".completion").forEach((item, place) => {
    const choose = (on) => made.querySelectorAll(".pictures svg.picture").forEach((shown) => {
      shown.classList.toggle("chosen", on && !!shown.querySelector(`[data-of="${place}"]`));
      shown.querySelectorAll(`[data-of="${place}"]`).forEach((each) => each.classList.toggle("chosen", on));
    });
    item.addEventListener("pointerenter", () => choose(true));
    item.addEventListener("pointerleave", () => choose(false));
  });
  return made;
}

// filters, pages ------------------------------------------------------------------------------

const state = { page: 0, shown: [] };
const value = (id) => (find(id) ? find(id).value.trim() : "");
const words = new Map();

function text_of(row) {
  if (!words.has(row)) {
    const answers = row.completions || [...(row.before || []), ...(row.after || [])];
    const parts = [row.messages.map((m) => m.text), Object.values(row.answers), answers.map((one) => [plain(one.thinking), plain(one.text), (one.turns || []).map((t) => [turn_head(t), plain(t.text)])])];
    words.set(row, parts.flat(4).filter(Boolean).join("\n").toLowerCase());
  }
  return words.get(row);
}

function filtered() {
  const kind = value("f-kind") || (data.groups.length ? "groups" : "evaluations");
  const [from, to] = (value("f-step").match(/^(\d+)(?:\s*[-–]\s*(\d+))?$/) || []).slice(1).map((text) => (text === undefined ? null : Number(text)));
  const bound = (id) => (value(id) === "" || Number.isNaN(Number(value(id))) ? null : Number(value(id)));
  const low = bound("f-low"), high = bound("f-high"), uid = value("f-uid").toLowerCase(), text = value("f-text").toLowerCase(), run = value("f-run");
  const step_fits = (step) => step >= from && step <= (to === null || to === undefined ? from : to);
  return data[kind].filter((row) => {
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
  state.page = page;
  show();
}

function listen() {
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("filters").addEventListener("input", filter);
  find("filters").addEventListener("reset", () => setTimeout(filter));
  find("previous").addEventListener("click", () => turn(-1));
  find("next").addEventListener("click", () => turn(1));
  filter();
}

// the page of runs ----------------------------------------------------------------------------

// The two ends of a run's first evaluation set, as summary.json has them; of a run that goes on, of its evaluations.
function ends_of_run(run) {
  if (run.summary) {
    const share = known(run.summary.accuracy_after), ends = run.summary.first_set || {};
    const at = (when) => ({ ...ends[when], value: run.summary[`${share ? "accuracy" : "score"}_${when}`] });
    return [share ? "accuracy" : run.summary.headline, share, at("before"), at("after")];
  }
  const now = run.last_evaluation;
  const [, set, word] = Object.keys(now).map((name) => name.match(/^eval\/((?:(?!\/task\/).)+)\/(accuracy|score)$/)).find(Boolean) || [];
  const share = `eval/${set}/accuracy` in now;
  const at = (row) => ({ value: row[`eval/${set}/${share ? "accuracy" : "score"}`], interval: pair(row, `eval/${set}/score`),
    blind: run.blind && { kind: run.blind, score: row["eval/blind/score"], gap: row["eval/blind/gap"], gap_interval: pair(row, "eval/blind/gap") } });
  const first = run.first_evaluation.step === now.step ? {} : at(run.first_evaluation);
  return [share ? "accuracy" : "score", share, first, word ? at(now) : {}];
}

// [word, value, unit, note] of each card at the top.
function summary_cards(run) {
  const [word, share, before, after] = ends_of_run(run), control = after.blind, cards = [];
  const interval = (ends, how) => ends && `95 % interval ${span(ends, share, how)}`;
  const note = (...parts) => parts.filter(Boolean).join("; ");
  if (known(after.value)) {
    cards.push([word, score(after.value, share), "", note(interval(after.interval, score),
      known(before.value) && `from ${score(before.value, share)}, ${points(after.value - before.value, share)}`)]);
  }
  if (control && known(control.gap)) {
    cards.push([`what ${data.controls[control.kind][1]}`, difference(control.gap, share), share ? "points" : "", note(interval(control.gap_interval, difference),
      known(control.score) && `${data.controls[control.kind][0]}: ${score(control.score, share)}`, before.blind && known(before.blind.gap) && `from ${points(before.blind.gap, share)}`)]);
  }
  if (known(run.reward)) cards.push(["reward", run.reward.toFixed(3), "", run.reward_steps > 1 ? `mean of the last ${run.reward_steps} steps, from ${run.first_reward.toFixed(3)}` : ""]);
  if (known(run.last_step)) cards.push(["steps", String(run.last_step), "", run.step_seconds ? `${run.step_seconds.toFixed(1)} s each` : ""]);
  if (run.summary) cards.push(["time", duration(run.summary.seconds), "", "from start to end"]);
  return cards;
}

// [set, before, after, interval, change] of each set, and of the blind control of the first.
function evaluation_rows(run) {
  if (!run.summary) return [];
  const [, share] = ends_of_run(run), { before = {}, after = {} } = run.summary.first_set || {};
  const row = (set, then, now, interval, show, how = show) => [set, known(then) ? show(then, share) : "–", known(now) ? show(now, share) : "–",
    span(interval, share, how), known(then) && known(now) ? points(now - then, share) : "–"];
  return Object.entries(run.summary.eval).flatMap(([set, ends], i) => {
    const now = run.last_evaluation, name = `eval/${set}/score`, control = i === 0 && after.blind, then = before.blind || {};
    const logged = now[name] === ends.after ? pair(now, name) : null;
    const rows = [row(set, ends.before, ends.after, i === 0 ? after.interval : logged, score)];
    if (control) {
      rows.push(row(`${set}, ${data.controls[control.kind][0]}`, then.score, control.score, control.interval, score),
        row(`${set}, what ${data.controls[control.kind][1]}`, then.gap, control.gap, control.gap_interval, points, difference));
    }
    return rows;
  });
}

function run_header(run, i) {
  const steps = run.summary ? run.summary.steps : run.last_step || 0, started = run.environment.started, events = run.events;
  return el("header", {}, i === 0 && el("h1", {}, data.runs.map((each) => each.name).join(" · ")),
    data.runs.length > 1 && el("h3", { class: "key" }, el("i", { class: run_look(i) }), run.name),
    el("p", { class: "lead" }, steps || run.summary ? `${count(steps, "step")}${run.summary ? ", finished" : " so far"}` : "no step yet",
      started && `; started ${String(started).replace("T", " ").replace("+00:00", " UTC")}`),
    el("div", { class: "cards" }, summary_cards(run).map(([word, value, unit, note]) => el("div", { class: "card" }, el("div", { class: "word" }, word),
      el("div", { class: "value" }, value, unit && [" ", el("span", {}, unit)]), el("div", { class: "note" }, note)))),
    events.length > 0 && el("details", { class: "events", ...(events.length < 4 ? { open: "" } : {}) }, el("summary", {}, `${count(events.length, "time")} a guard fired`),
      el("ul", {}, events.map((event) => el("li", {}, `step ${event.step}: `, el("b", {}, event.name), ` (${event.action}): ${event.message}`)))));
}

function curves() {
  const zero = data.charts.filter((chart) => chart.zero).map((chart) => chart.title.toLowerCase());
  const events = data.runs.length === 1 ? data.runs[0].events : [];
  const figures = data.charts.filter((chart) => !chart.zero).map((chart) => figure(chart, events)), more = figures.slice(IN_VIEW);
  return data.charts.length ? [el("h2", {}, "Curves"), el("div", { class: "charts" }, figures.slice(0, IN_VIEW)),
    more.length > 0 && el("details", { class: "more" }, el("summary", {}, count(more.length, "more curve")), el("div", { class: "charts" }, more)),
    data.expected.map((source) => el("p", { class: "soft" }, `Expected ${source}`)),
    zero.length > 0 && el("p", { class: "soft" }, `0 throughout, and not drawn: ${zero.join(", ")}.`)] : [];
}

function evaluation_table() {
  const rows = data.runs.flatMap((run) => evaluation_rows(run).map(([set, ...cells]) => [data.runs.length > 1 ? `${run.name}: ${set}` : set, ...cells]));
  const cells = (tag, texts) => el("tr", {}, texts.map((text, i) => el(tag, i ? { class: "num" } : {}, text)));
  return rows.length ? [el("h2", {}, "Evaluation"), el("div", { class: "scroll" }, el("table", { class: "facts evaluations" },
    cells("th", ["set", "before", "after", "95 % interval", "change"]), rows.map((row) => cells("td", row))))] : [];
}

function shown_of(run) {
  const shown = run.shown, megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
  return ` Shown ${data.runs.length > 1 ? `of ${run.name} ` : ""}are ${count(shown.groups, "group")} of ${shown.steps} of the ${count(shown.logged, "logged step")}`
    + `${shown.evaluations ? ` and ${count(shown.evaluations, "evaluation row")}` : ""}.`
    + (shown.left_out || shown.steps < shown.logged ? " The last step and the first come first, then steps spread evenly between, until the page holds "
      + `${megabytes(data.budget.texts)} of text or ${megabytes(data.budget.images)} of images; of a step that does not fit, the groups whose rewards differ most.` : "");
}

function sight_legend() {
  const key = (nats, meaning) => el("span", {}, el("i", { class: "sight " + shade(nats) }, "token"), ` ${meaning}`);
  return el("p", { class: "legend sights" }, "Sight, how much likelier its images make a token than those of another row:", key(0, `within ${SHADES[0]} nats of 0`),
    SHADES.map((from) => key(from, `from ${from} nats, ${+Math.exp(from).toPrecision(2)} times as likely`)), key(-AGAINST[0], `below -${AGAINST[0]} nats: likelier with the other image`));
}

function rollouts() {
  const rows = [...data.groups, ...data.evaluations];
  if (!rows.length) return [];
  const both = data.groups.length > 0 && data.evaluations.length > 0, sight = data.groups.some((row) => row.completions.some((one) => one.sight));
  const select = (id, word, options) => el("label", {}, word, el("select", { id }, options.map(([key, text]) => el("option", { value: key }, text))));
  const input = (id, word, attributes) => el("label", {}, word, el("input", { id, autocomplete: "off", ...attributes }));
  return [el("h2", {}, "Rollouts"),
    el("p", { class: "lead" }, "Colour is the advantage: green is made likelier, red less likely.", data.runs.map(shown_of)), sight && sight_legend(),
    el("form", { id: "filters" }, both && select("f-kind", "show", [["groups", "rollouts"], ["evaluations", "evaluation rows"]]),
      data.runs.length > 1 && select("f-run", "run", [["", "all"], ...data.runs.map((run, i) => [i, run.name])]),
      input("f-step", "step", { placeholder: "12 or 10-20" }), input("f-low", "reward from", { inputmode: "decimal" }), input("f-high", "to", { inputmode: "decimal" }),
      input("f-uid", "row"), input("f-text", "text", { class: "wide", type: "search" }),
      el("button", { type: "reset" }, "clear")),
    el("nav", {}, el("button", { type: "button", id: "previous" }, "previous"), el("span", { id: "status", role: "status" }), el("button", { type: "button", id: "next" }, "next")),
    el("div", { id: "groups" })];
}

function about(run) {
  const { started, starts, rewards = [], ...environment } = run.environment, { certificate = {} } = run.summary || {};
  const pairs = (value) => Object.entries(value).filter((entry) => known(entry[1])).map((entry) => entry.join(" ")).join(", ");
  const words = (key, value) => (Array.isArray(value) ? value.join(key === "command" ? " " : ", ") : typeof value === "object" ? pairs(value) : String(value));
  const table = (name, rows) => rows.length > 0 && [el("h3", {}, name), el("table", { class: "facts" }, rows.map(([key, value]) => el("tr", {}, el("th", {}, key), el("td", {}, value))))];
  return [el("h2", {}, data.runs.length === 1 ? "The run" : run.name), table("What differs from the defaults", run.changed),
    table("Machine and versions", [...Object.entries(environment).filter((entry) => entry[1]).map(([key, value]) => [key, words(key, value)]), ...rewards.map((reward) => ["reward", pairs(reward)])]),
    Object.keys(certificate).length > 0 && el("details", {}, el("summary", {}, "Certificate"), table("Counted from the run's files", Object.entries(certificate))),
    run.config && el("details", {}, el("summary", {}, "Configuration"), el("pre", {}, run.config))];
}

// the page of a check -------------------------------------------------------------------------

// The numbers of an overlay: of a box those of two corners.
function coordinates({ points: ends }) {
  const box = ends.length === 4 && ends[1].join() === [ends[2][0], ends[0][1]].join() && ends[3].join() === [ends[0][0], ends[2][1]].join();
  return `[${(box ? [ends[0], ends[2]] : ends).flat().map((each) => +each.toPrecision(5)).join(", ")}]`;
}

function checked_image(row, image, i) {
  const [width, height] = data.pictures[image.name], overlays = row.gold.filter((each) => each.image === i), [wide, high] = image.original;
  return [picture(image.name, `image ${i + 1} of ${row.row}`, overlays.map((each) => [each, "gold", -1])),
    el("p", { class: "soft" }, `${width} × ${height} pixels`, (wide !== width || high !== height) && `, ${wide} × ${high} in the dataset`, image.jpeg && "; shown as JPEG"),
    [...new Set(overlays.map((each) => each.label))].map((label) => {
      const same = overlays.filter((each) => each.label === label);
      return el("p", { class: "soft" }, el("i", { class: "swatch gold" }), ` ${label}: `, same.slice(0, 8).map(coordinates).join("; "), same.length > 8 && " and more");
    })];
}

function checked_row(row) {
  const entry = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
  return el("section", { class: "checked" }, el("h3", {}, row.row),
    el("p", { class: "legend" }, el("b", {}, `${row.tokens.all} tokens`), el("span", {}, `text ${row.tokens.text}`), el("span", {}, `${row.videos.length ? "images and videos" : "images"} ${row.tokens.media}`)),
    row.images.map((image, i) => checked_image(row, image, i)), strips(row.videos, row.row),
    row.videos.map(({ frames }) => el("p", { class: "soft" }, `${count(frames.length, "frame")} of ${data.pictures[frames[0]].join(" × ")} pixels`)), row.notes.map((note) => el("p", { class: "bad" }, `not drawn: ${note}`)),
    el("pre", {}, row.prompt.map(([text, special]) => (special ? el("b", {}, text) : text))),
    el("dl", {}, row.answers.map(([name, value]) => entry(`right answer, ${name}`, value)), row.columns.map(([name, value]) => entry(name, value))));
}

function checked_set(set) {
  const lengths = set.lengths, more = set.refused_count - set.refused.length;
  return [el("h2", {}, set.name),
    lengths && el("p", {}, `${count(set.usable, "row")} can be used. `, lengths.low === lengths.high ? `Each prompt has ${lengths.low} tokens.`
      : `Tokens of a prompt: ${lengths.low} to ${lengths.high}, ${lengths.mean} on average. The longest is ${lengths.longest}.`),
    set.refused_count > 0 && [el("h3", { class: "bad" }, `${count(set.refused_count, "row")} cannot be used`),
      el("ul", {}, set.refused.map(([row, message]) => el("li", {}, el("b", {}, row), `: ${message}`)))], more > 0 && el("p", { class: "soft" }, `and ${more} more`),
    set.shown.map(checked_row),
    set.left_out > 0 && el("p", { class: "soft" }, `${count(set.left_out, "more row")} not shown: a page holds at most ${data.megabytes} MB of images and texts.`)];
}

const PAGES = {
  run: () => [data.runs.map(run_header), curves(), evaluation_table(), rollouts(), data.runs.map(about)],
  check: () => [el("h1", {}, "What the model sees"),
    el("p", { class: "lead" }, "Images at the size that the model gets them, frames of videos reduced, prompts as the ids that it is sent read back; what stands on purple ground is a special token. Marked in pink is what rewards compare with."),
    data.shared.map((sentence) => el("p", { class: "bad" }, sentence)), data.sets.map(checked_set)],
};

// A row of links to the sections, above the first of them.
function contents() {
  const heads = [...main.querySelectorAll("h2")];
  heads.forEach((head, i) => head.setAttribute("id", `section-${i + 1}`));
  if (heads.length > 1) heads[0].before(el("nav", { class: "contents", "aria-label": "sections" }, heads.map((head) => el("a", { href: `#${head.id}` }, head.textContent))));
}

fill(main, { class: data.kind }, PAGES[data.kind]());
contents();
if (find("filters")) listen();
