// Numbers for people.
import { TEXTS } from "./texts.js";

const GIB = 2 ** 30;
const WHOLE = new Intl.NumberFormat("en");  // one for all: to make one takes longer than to write many numbers

export const wholeText = (value) => WHOLE.format(value);

export function rounded(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10 ** (digits - 1)) return wholeText(Math.round(value));
  return size >= 1000 ? value.toLocaleString("en", { maximumSignificantDigits: digits }) : String(+value.toPrecision(digits));
}

export function memoryText(bytes) {
  if (bytes >= GIB / 10) return `${(bytes / GIB).toFixed(bytes >= 100 * GIB ? 0 : 1)} GiB`;
  if (bytes >= 2 ** 20 || bytes === 0) return `${rounded(bytes / 2 ** 20)} MiB`;
  return bytes >= 1024 ? `${rounded(bytes / 1024)} KiB` : `${rounded(bytes)} B`;
}

export function bytesText(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (bytes >= 1000 && power < units.length - 1) { bytes /= 1000; power++; }
  return `${rounded(bytes)} ${units[power]}`;
}

// A time that stands beside another one has its unit.
export function secondsText(seconds, beside = seconds) {
  if (seconds === 0) return "0 s";
  if (beside >= 2 * 86400) return TEXTS.units.days(rounded(seconds / 86400));
  if (beside >= 2 * 3600) return TEXTS.units.hours(rounded(seconds / 3600));
  if (beside >= 120) return TEXTS.units.minutes(rounded(seconds / 60));
  if (beside >= 1) return `${rounded(seconds, 4)} s`;
  if (beside >= 1e-3) return `${rounded(seconds * 1e3)} ms`;
  return `${rounded(seconds * 1e6)} µs`;
}

export const shareText = (share) => `${(100 * share).toFixed(1)} %`;

export function countText(number) {
  if (number >= 0.9995e12) return `${rounded(number / 1e12)} T`;
  if (number >= 1e9) return `${rounded(number / 1e9)} B`;
  if (number >= 1e6) return `${rounded(number / 1e6)} M`;
  return rounded(number);
}

export function dollarsText(dollars) {
  if (dollars === null || dollars === undefined) return TEXTS.units.noPrice;
  if (dollars >= 1e6) return `$${rounded(dollars / 1e6)} M`;
  if (dollars > 0 && dollars < 0.01) return `$${rounded(dollars, 2)}`;
  return dollars < 100 ? `$${dollars.toFixed(2)}` : `$${rounded(dollars)}`;
}

// How much larger a value is than another one, as "+3.1 %"; empty if they are as good as equal.
export function changeText(value, other) {
  if (!other || Math.abs(value / other - 1) < 0.0005) return "";
  const change = 100 * (value / other - 1);
  return `${change > 0 ? "+" : "−"}${Math.abs(change).toFixed(1)} %`;
}
