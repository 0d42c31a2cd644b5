// The state of the page: texts by key ("job", "devices", "plan.tp"). It is the part of the page's address after #.
// A second plan, which is kept beside, is under the key "beside", as an address of its own.

const BESIDE = "beside";

function parse(text) {
  return Object.fromEntries(new URLSearchParams(text));
}

// `first` is the state of an address that says none: the job that the command was asked for.
export function readAddress(first) {
  const { [BESIDE]: beside, ...state } = parse(location.hash.slice(1));
  return { state: Object.keys(state).length ? state : first, beside: beside ? parse(beside) : null };
}

// Each is a step to which the browser's Back returns.
export function writeAddress({ state, beside }) {
  const words = new URLSearchParams(state);
  if (beside) words.set(BESIDE, new URLSearchParams(beside));
  const address = `#${words}`;
  if (address !== location.hash) history.pushState(null, "", address);
}

// A change of one of them changes how many replicas fill the cluster: the server says it anew.
const SETS_REPLICAS = ["device", "devices", "plan.tp", "plan.pp", "plan.cp"];

// The state after one field is set; an empty text means the job's own value.
export function withField(state, key, text, values) {
  const next = { ...state, [key]: text };
  if (text === "") delete next[key];
  if (SETS_REPLICAS.includes(key)) delete next["plan.dp"];
  if (key === "device") delete next.memory_gib;  // that of the device before
  if (key === "device" || key === "devices") {  // they describe the cluster anew
    for (const old of ["cluster.device", "cluster.nodes", "cluster.devices_per_node"]) delete next[old];
    if (key === "devices" && state["cluster.device"]) next.device = state["cluster.device"];
  }
  return next;
}

// The state of a model on the page's cluster. (A job of the catalog has a cluster of its own.)
export function ofModel(name, values) {
  const hasDevice = values.device && values.device !== "unknown";
  return { job: name, device: hasDevice ? values.device : "h100-sxm", devices: String(hasDevice ? values.devices : 64) };
}

// The state under another plan: `plan` are all the fields that differ from the job's own.
export function withPlan(state, plan) {
  const kept = Object.entries(state).filter(([key]) => !key.startsWith("plan.") && key !== "precision.float8");
  return { ...Object.fromEntries(kept), ...plan };
}
