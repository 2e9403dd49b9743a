// The timeline of a run: what the trainer did when, drawn, and as a file for Perfetto or chrome://tracing.

const KINDS = ["rollout", "update", "sync", "evaluation", "idle", "scoring", "rollout ahead", "preparation", "engine idle", "wait for weights"];
const BESIDE = ["scoring", "rollout ahead", "engine idle", "wait for weights"]; // they overlap the others
const LANES = ["trainer", ...BESIDE];

/**
 * Returns spans {kind, rollout, start, seconds} from the columns time/*. A resumed run goes on where the one before ended. Only the
 * sum of what overlaps the trainer is known: it ends when its rollout is handed over, and a rollout ahead begins at the handover
 * before if it is shorter than that.
 */
function spans(x, y) {
  const found = [];
  const of = (name, i) => y[`time/${name}`]?.[i] ?? 0;
  let [base, last, at, handed] = [0, -1, 0, null];
  const first = y["time/started"]?.find((started) => started != null) ?? 0;
  const add = (kind, rollout, seconds) => { if (seconds > 0) found.push({ kind, rollout, start: at, seconds }); at += seconds; };
  x.forEach((rollout, i) => {
    const started = y["time/started"]?.[i] ?? null;
    if (started != null) {
      const begins = started < last || last < 0; // the first process, or another one
      if (started < last) base = at;
      last = started;
      add(begins ? "preparation" : "idle", rollout, Math.max(0, base + started - at));
    } else if (!i) add("preparation", rollout, Math.max(0, first - of("eval", i))); // the evaluation comes right before the first rollout
    add("sync", rollout, of("sync", i));
    add("rollout", rollout, of("rollout", i));
    const beside = (kind, seconds, start = at - seconds) => { if (seconds > 0) found.push({ kind, rollout, start: Math.max(0, start), seconds }); };
    beside("scoring", Math.min(of("score", i), of("rollout", i) || Infinity));
    if (handed != null) beside("rollout ahead", of("played", i), Math.min(handed, at - of("played", i)));
    if (handed != null) beside("engine idle", Math.min(of("engine_idle", i), at - handed));
    beside("wait for weights", of("weights", i));
    handed = at;
    add("update", rollout, of("update", i));
    add("evaluation", rollout, of("eval", i));
  });
  return found;
}

/** Returns the spans in Chrome's trace format. */
const trace = (all) => ({ displayTimeUnit: "ms", traceEvents: [
  ...LANES.map((name, tid) => ({ name: "thread_name", ph: "M", pid: 1, tid, args: { name } })),
  ...all.map(({ kind, rollout, start, seconds }) => ({ name: kind, cat: "grpo", ph: "X", pid: 1, tid: Math.max(0, LANES.indexOf(kind)),
    ts: Math.round(1e6 * start), dur: Math.round(1e6 * seconds), args: { rollout } }))] });

/** Returns a bar of all time, and the spans of the trainer with what overlaps them below. */
function timeline(x, y) {
  const all = spans(x, y);
  if (!all.length) return html("p", { class: "soft" }, "No times were logged.");
  const sum = (kind) => all.reduce((total, span) => total + (span.kind === kind ? span.seconds : 0), 0);
  const end = Math.max(...all.map((span) => span.start + span.seconds));
  const lanes = LANES.filter((lane, n) => !n || all.some((span) => span.kind === lane));
  const [wide, tall, row] = [1200, 24 * lanes.length + 20, 24];
  const picture = svg("svg", { viewBox: `0 0 ${wide} ${tall}`, preserveAspectRatio: "none", role: "img", "aria-label": "timeline of the run" },
    all.map(({ kind, rollout, start, seconds }) => svg("rect", { x: (start / end) * wide, width: Math.max(0.3, (seconds / end) * wide),
      y: 2 + row * Math.max(0, lanes.indexOf(kind)), height: row - 4, fill: colour(KINDS.indexOf(kind)), opacity: ["idle", "preparation", "engine idle"].includes(kind) ? 0.35 : 1 },
      svg("title", {}, `rollout ${rollout}, ${kind}: ${tell(seconds, "seconds")} from ${tell(start, "seconds")}`))));
  const marks = html("div", { class: "marks soft" }, [0, 1, 2, 3, 4].map((n) => html("span", {}, n ? tell((n * end) / 4, "seconds") : "0 s")));
  const inner = html("div", {}, picture, marks);
  picture.style.height = `${tall - 20}px`;
  const zoom = html("select", { id: "zoom", "aria-label": "zoom", change: () => { inner.style.width = `${100 * zoom.value}%`; } },
    [1, 2, 5, 20, 100].map((times) => html("option", { value: times }, `${times} ×`)));
  const save = html("button", { id: "trace", click: () => {
    const url = URL.createObjectURL(new Blob([JSON.stringify(trace(all))], { type: "application/json" }));
    html("a", { href: url, download: "trace.json" }).click();
    URL.revokeObjectURL(url);
  } }, "save as trace.json");
  const kinds = KINDS.filter((kind) => sum(kind) > 0);
  const labels = kinds.map((kind) => `${kind} ${tell(sum(kind), "seconds")} (${perCent(sum(kind) / end)})`);
  return html("div", { class: "card" },
    html("p", { class: "soft" }, "What the trainer did when. Preparation is what comes before the first evaluation or rollout, such as the preflight, also of a resumed run. Idle is what none of the others explains, such as writing checkpoints. Scoring overlaps sampling: its bar has its length and ends with the rollout. So do the bars of rollouts ahead, and of an engine or samples that wait. Perfetto and chrome://tracing open the file."),
    legend(labels, kinds.map((kind) => KINDS.indexOf(kind))), html("div", { class: "scroll" }, inner), html("div", { class: "row" }, zoom, save));
}
