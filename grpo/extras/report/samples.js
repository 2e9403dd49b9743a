// The sample browser: choose a rollout; search, filter and sort its samples; read and compare them.

const PAGE = 100; // rows drawn at once
const STEPS = { rollout: ["Rollouts", "rollout "], discarded: ["Discarded groups", "discarded in "], evaluation: ["Evaluations", "evaluation after "] };
const stepName = (step) => STEPS[step.kind][1] + step.rollout;
const COLUMNS = [
  ["reward", "What the policy is rewarded for this answer; – is unknown."],
  ["advantage", "How much better than the rest of its group: above 0 makes the answer more likely, 0 teaches nothing."],
  ["tokens", "Tokens that the policy wrote."],
];
const verdict = (sample) =>
  sample.reward == null || sample.correct == null ? ["?", "unknown", "soft"] : sample.correct ? ["✓", "right", "good"] : ["✗", "wrong", "bad"];

const UNITS = [/[\s\S]/gu, /[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu, /[^\n]*\n|[^\n]+/g, /[\s\S]+/g]; // characters, words, lines, all

/**
 * Compares two texts by their longest common subsequence of words or characters, or of larger units if the texts are long.
 * Returns two lists of [text, is it in both].
 */
function difference(a, b, characters) {
  let left, right;
  for (const unit of UNITS.slice(characters ? 0 : 1)) {
    [left, right] = [a, b].map((text) => text.match(unit) ?? []);
    if (left.length * right.length < 9e6) break; // fast enough
  }
  const [n, m] = [left.length, right.length];
  const width = m + 1;
  const best = new Uint16Array((n + 1) * width);
  for (let i = n - 1; i >= 0; i--)
    for (let j = m - 1; j >= 0; j--)
      best[i * width + j] = left[i] === right[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
  const sides = [[], []];
  const put = (side, text, same) => {
    const end = sides[side].at(-1);
    if (end && end[1] === same) end[0] += text;
    else sides[side].push([text, same]);
  };
  for (let i = 0, j = 0; i < n || j < m; ) {
    if (i < n && j < m && left[i] === right[j]) { put(0, left[i++], true); put(1, right[j++], true); }
    else if (j < m && (i === n || best[i * width + j + 1] > best[(i + 1) * width + j])) put(1, right[j++], false);
    else put(0, left[i++], false);
  }
  return sides;
}

const groupBy = (samples) => [...Map.groupBy(samples, (sample) => sample.prompt_index).values()];

/** Returns why a group teaches nothing; "" if it does not look so. */
function reason(group) {
  const known = group.filter((sample) => sample.reward != null);
  if (!known.length) return "no reward is known";
  if (known.every((sample) => sample.reward === known[0].reward)) return `every reward is ${tell(known[0].reward)}`;
  if (known.every((sample) => sample.correct === known[0].correct)) return `every answer is ${known[0].correct ? "right" : "wrong"}`;
  return "";
}

/** Returns a sentence on the groups of a step: how many teach something, and why the others do not. */
function groupsOf(step) {
  const groups = groupBy(step.samples);
  const gone = step.kind === "discarded";
  const idle = gone ? groups : groups.filter((group) => group.every((sample) => !sample.advantage));
  const counts = new Map();
  for (const group of idle) {
    const why = reason(group) || (gone ? "left out by the selection" : "every advantage is 0");
    counts.set(why, (counts.get(why) ?? 0) + 1);
  }
  const whys = [...counts].map(([why, n]) => `${why} (${n})`).join(", ");
  if (gone) return `${plural(groups.length, "group")} shown that the policy did not learn from: ${whys}.`;
  return `${plural(groups.length, "group")}, of which ${groups.length - idle.length} teach something${whys ? `; the others do not: ${whys}` : ""}.`;
}

/** Returns a picture, or its name if the run has kept no copy. */
const picture = (name) => (data.pictures[name] ? html("img", { src: data.pictures[name], alt: `picture ${name}`, title: name }) : `[picture ${name}]`);
const MARK = "<image>"; // the place of a picture in a text

/** Returns a text between two places with its pictures; those before them come first. names: of all pictures of the text, else
 * they are not its own: it was shortened, or an <image> in it is a word. */
function withPictures(text, names, from = 0, to = text.length) {
  if (names?.length !== text.split(MARK).length - 1) return [text.slice(from, to)];
  const before = text.slice(0, from).split(MARK).length - 1;
  const parts = text.slice(from, to).split(MARK);
  return [...names.slice(0, before).map(picture), ...parts.flatMap((part, i) => (i ? [picture(names[before + i - 1]), part] : [part]))];
}

function conversation(messages) {
  return messages.map((message) => html("div", { class: `message ${message.role === "assistant" ? "assistant" : ""}` },
    html("div", { class: "soft" }, message.role),
    html("div", { class: "text" }, typeof message.content === "string" ? message.content : message.content.map((part) => (part.type === "image" ? picture(part.image) : part.text))),
    message.tool_calls ? html("div", { class: "text soft" }, JSON.stringify(message.tool_calls)) : null));
}

/** Returns the sampled tokens under a title, each with the colour and the strength, up to 1, that its value has. */
function coloured(id, title, pieces, values, look, words) {
  const spans = pieces.map((piece, i) => {
    const span = html("span", { title: words(values[i]) }, piece);
    const [colour, strength] = look(values[i]);
    span.style.backgroundColor = `color-mix(in srgb, var(--${colour}) ${Math.round(75 * Math.min(1, strength / Math.log(100)))}%, transparent)`;
    return span;
  });
  return [html("h3", {}, title), html("div", { class: "text", id }, spans)];
}

const tokens = (sample) => coloured("tokens", "Tokens (full colour: probability of 1 % or less)", sample.pieces, sample.logprobs, (logprob) => ["c1", -logprob],
  (logprob) => `probability ${tell(Math.exp(logprob))}, log-probability ${tell(logprob)}`);
const divergences = (sample) => coloured("divergences", "Divergence from the teacher (orange: more likely for the policy; green: for the teacher; full colour: 4.6 nats)",
  sample.pieces, sample.divergence, (nats) => [nats > 0 ? "bad" : "good", Math.abs(nats ?? 0)], (nats) => (nats == null ? "not judged" : `${tell(nats)} nats`));

/** Returns the length of the common beginning of all texts, in whole words; 0 if all are equal. Few-shot prompts share a beginning. */
function sharedStart(texts) {
  const [first, ...others] = new Set(texts);
  if (!others.length) return 0;
  let n = 0;
  while (n < first.length && others.every((text) => text[n] === first[n])) n++;
  return first.slice(0, n).search(/\S*$/);
}

function browser(data) {
  const { steps, conversations } = data;
  const everything = steps.flatMap((step) => step.samples.map((sample) => Object.assign(sample, { step })));
  const byItem = new Map();
  for (const sample of everything) byItem.set(sample.item, [...(byItem.get(sample.item) ?? []), sample]);
  const prompt = (sample) => sample.prompt ?? "";
  for (const step of steps) step.shared = sharedStart(step.samples.map(prompt));
  const state = { step: steps.at(-1), sort: "", up: false, limit: PAGE, open: null };

  const group = (kind, label) => html("optgroup", { label }, steps.map((step, i) =>
    step.kind === kind ? html("option", { value: i, selected: step === state.step }, `${stepName(step)} (${step.samples.length})`) : null));
  const redraw = () => { state.limit = PAGE; list(); };
  const pick = html("select", { id: "step", "aria-label": "rollout or evaluation", change: () => go(+pick.value) },
    ...Object.entries(STEPS).filter(([kind]) => steps.some((step) => step.kind === kind)).map(([kind, [label]]) => group(kind, label)));
  const search = html("input", { type: "search", id: "search", placeholder: "search prompts and completions", "aria-label": "search", input: redraw });
  const kind = html("select", { id: "kind", "aria-label": "right or wrong", change: redraw }, ["all", "right", "wrong", "unknown"].map((name) => html("option", {}, name)));
  const [least, most] = ["least", "most"].map((id) => html("input", { type: "number", step: "any", id, placeholder: id, "aria-label": `${id} reward`, input: redraw }));
  const count = html("span", { class: "soft", id: "count", role: "status" });
  const go = (i) => { state.step = steps[Math.max(0, Math.min(steps.length - 1, i))]; pick.value = steps.indexOf(state.step); redraw(); };
  const groups = html("p", { class: "soft", id: "groups" });
  const place = html("div", { class: "card list" });
  const detail = html("div", { class: "card", id: "detail", tabindex: -1 }, html("p", { class: "soft" }, "Open a sample to read it."));

  const wanted = () => {
    const text = search.value.trim().toLowerCase();
    const [low, high] = [least, most].map((input) => (input.value === "" ? null : +input.value));
    const found = state.step.samples.filter((sample) =>
      (kind.value === "all" || verdict(sample)[1] === kind.value) &&
      (low == null || (sample.reward != null && sample.reward >= low)) && (high == null || (sample.reward != null && sample.reward <= high)) &&
      (!text || prompt(sample).toLowerCase().includes(text) || sample.completion.toLowerCase().includes(text)));
    if (!state.sort) return found;
    const known = found.filter((sample) => sample[state.sort] != null).sort((a, b) => (state.up ? 1 : -1) * (a[state.sort] - b[state.sort]));
    return [...known, ...found.filter((sample) => sample[state.sort] == null)];
  };

  const heading = (name, label) => html("th", { "aria-sort": name && state.sort === name ? (state.up ? "ascending" : "descending") : "none" },
    html("button", { "data-sort": name, click: () => {
      state.up = state.sort === name ? !state.up : false;
      state.sort = name;
      list();
      place.querySelector(`[data-sort="${name}"]`).focus();
    } }, label, name && state.sort === name ? (state.up ? " ▲" : " ▼") : ""));

  const list = () => {
    const found = wanted();
    const columns = COLUMNS.filter(([name]) => state.step.samples.some((s) => s[name] != null));
    const rows = found.slice(0, state.limit).map((sample) => {
      const [mark, word, style] = verdict(sample);
      const open = html("button", { "aria-label": `open sample ${sample.prompt_index}.${sample.sample}` },
        html("span", { class: "soft" }, prompt(sample) ? withPictures(prompt(sample), sample.pictures, state.step.shared, state.step.shared + 300) : "(no prompt)"), html("span", {}, sample.completion.slice(0, 300) || "(nothing)"));
      return html("tr", { click: () => read(sample), "aria-selected": String(sample === state.open) }, html("td", {}, open),
        html("td", { class: style, title: word }, mark), ...columns.map(([name]) => html("td", { "data-head": name }, tell(sample[name]))));
    });
    count.textContent = `${found.length} of ${plural(state.step.samples.length, "sample")}`;
    groups.textContent = state.step.kind === "evaluation" ? "" : groupsOf(state.step);
    place.replaceChildren(html("table", {}, html("thead", {}, html("tr", {}, heading("", "prompt and completion"), html("th", {}),
      columns.map(([name]) => heading(name, name)))), html("tbody", {}, rows)));
    if (found.length > state.limit) place.append(html("button", { click: () => { state.limit += PAGE; list(); } }, `${found.length - state.limit} more`));
  };

  const read = (sample, asked = true) => {
    state.open = sample;
    if (sample.step !== state.step) go(steps.indexOf(sample.step));
    else list();
    const [mark, word, style] = verdict(sample);
    const facts = { reward: tell(sample.reward), ...(sample.advantage == null ? {} : { advantage: tell(sample.advantage) }), tokens: sample.tokens, turns: sample.turns,
      end: sample.end + (sample.truncated && sample.end !== "truncated" ? ", truncated" : ""), outcome: sample.outcome ?? "–",
      ...Object.fromEntries(Object.entries(sample.parts).map(([name, value]) => [name, tell(value)])), ...(sample.env_error ? { error: sample.env_error } : {}) };
    const same = (byItem.get(sample.item) ?? []).filter((other) => sample.item != null && other !== sample);
    const siblings = state.step.samples.filter((other) => other.prompt_index === sample.prompt_index);
    const result = html("div", { id: "diff" });
    const characters = html("input", { type: "checkbox", id: "characters", change: () => compare() });
    const against = html("select", { id: "against", "aria-label": "compare with", change: () => compare() }, html("option", { value: "" }, "nothing"),
      same.map((other, i) => html("option", { value: i }, `${stepName(other.step)}, sample ${other.prompt_index}.${other.sample} ${verdict(other)[0]}`)));
    const compare = () => {
      result.replaceChildren();
      if (against.value === "") return;
      const other = same[+against.value];
      const pair = other.step.rollout > sample.step.rollout ? [sample, other] : [other, sample];
      const sides = difference(pair[0].completion, pair[1].completion, characters.checked);
      if (pair[0].completion === pair[1].completion) result.append(html("p", { class: "soft" }, "The two completions are identical."));
      result.append(html("div", { class: "two" }, sides.map((side, i) => html("div", {},
        html("div", { class: "soft" }, `${stepName(pair[i].step)}, reward ${tell(pair[i].reward)} ${verdict(pair[i])[0]}`),
        html("div", { class: "text" }, side.map(([text, both]) => (both ? text : html(i ? "ins" : "del", {}, text))))))));
    };
    const card = (other, title) => html("button", { class: "member", "aria-current": String(other === sample), click: () => read(other) },
      html("span", { class: verdict(other)[2] }, `${verdict(other)[0]} ${title}`),
      html("span", { class: "soft" }, `reward ${tell(other.reward)} `, other.advantage == null ? null : html("b", { class: other.advantage > 0 ? "good" : other.advantage < 0 ? "bad" : null },
        `advantage ${other.advantage > 0 ? "+" : ""}${tell(other.advantage)}`)),
      html("span", { class: "text" }, other.completion || "(nothing)"));
    const members = (title, cards) => [html("h3", {}, title), html("div", { class: "members" }, cards)];
    const later = steps.filter((step) => step.kind === sample.step.kind).map((step) => (step === sample.step ? sample : same.find((other) => other.step === step))).filter(Boolean);
    const why = sample.step.kind === "discarded" ? reason(siblings) || "left out by the selection" : "";
    const columns = sample.example == null ? [] : Object.entries(data.examples[sample.example] ?? {});
    if (asked) detail.dataset.open = ""; // somebody reads
    detail.replaceChildren(...[
      html("div", { class: "row" }, html("b", {}, `${stepName(sample.step)}, prompt ${sample.prompt_index}, sample ${sample.sample}`), html("span", { class: `pill ${style}` }, `${mark} ${word}`)),
      html("div", { class: "facts" }, Object.entries(facts).map(([name, value]) => html("div", {}, `${name} `, html("b", {}, String(value))))),
      why ? html("p", { class: "soft" }, `The policy did not learn from this group: ${why}.`) : null,
      html("h3", {}, "Conversation"), ...conversation(conversations[sample.conversation]),
      html("div", { class: "message assistant" }, html("div", { class: "soft" }, "completion"), html("div", { class: "text", id: "completion" }, sample.completion),
        sample.tool_calls ? html("div", { class: "text soft" }, sample.tool_calls) : null),
      sample.gold == null ? null : html("div", { class: "message" }, html("div", { class: "soft" }, "right answer"), html("div", { class: "text", id: "gold" }, sample.gold)),
      columns.length ? html("details", { id: "example" }, html("summary", { class: "soft" }, "The example's columns"), html("dl", {}, columns.flatMap(([name, value]) =>
        [html("dt", {}, name), html("dd", { class: "text" }, typeof value === "string" ? value : JSON.stringify(value))]))) : null,
      ...(siblings.length > 1 ? members("The group, side by side", siblings.map((other) => card(other, `sample ${other.sample}`))) : []),
      ...(later.length > 1 ? members("The same prompt at several steps", later.map((other) => card(other, stepName(other.step)))) : []),
      ...(sample.pieces ? tokens(sample) : []),
      ...(sample.divergence ? divergences(sample) : []),
      ...(same.length ? [html("h3", {}, "Compare"), html("div", { class: "row" }, html("label", { for: "against" }, "compare with"), against,
        html("label", {}, characters, " by characters")), result] : [html("p", { class: "soft" }, "This page has no other sample of this question.")])].filter(Boolean));
    detail.scrollTop = 0;
    if (asked && matchMedia("(max-width: 760px)").matches) detail.scrollIntoView({ block: "start" });
  };

  if (state.step.samples.length) read(state.step.samples[0], false);
  else list();
  const turn = (by, label, text) => html("button", { "aria-label": label, click: () => go(steps.indexOf(state.step) + by) }, text);
  return [html("div", { class: "row" }, turn(-1, "previous", "◀"), pick, turn(1, "next", "▶"), search, kind, html("span", { class: "row" }, "reward", least, most), count),
    groups, html("div", { class: "browser" }, place, detail), glossary(COLUMNS)];
}
