// The table of s: of a sentence, under a question, at a token. All numbers are in the page. And the
// table of contents, which closes when one of its lines was followed.
"use strict";
const { adapters, sentences } = JSON.parse(document.getElementById("numbers").textContent);
const questions = Object.keys(adapters).slice(1);
const [sentence, tokens, said, table] = ["sentence", "tokens", "said", "s"].map((id) =>
  document.getElementById(id),
);
let way = "";
let token = 0;

function element(name, text, ...children) {
  const made = document.createElement(name);
  made.append(text, ...children);
  return made;
}

function signed(number) {
  return (number < 0 ? "−" : "+") + Math.abs(number).toFixed(2);
}

// One radio button for each token, so that arrow keys move between them.
function drawTokens(texts) {
  token = Math.min(token, texts.length - 1);
  const labels = texts.map((text, i) => {
    const input = document.createElement("input");
    Object.assign(input, { type: "radio", name: "token", value: i, checked: i === token });
    return element("label", input, element("span", text));
  });
  tokens.replaceChildren(tokens.firstElementChild, ...labels);
}

function cell(s, before) {
  const made = element("td", s.toFixed(2));
  made.className = "heat";
  made.style.setProperty("--s", s);
  made.title = s;
  if (before !== undefined && Math.abs(s - before) >= 0.05) {
    made.append(element("small", signed(s - before)));
  }
  return made;
}

function drawTable({ s, answer }, truth, other) {
  const layers = s.map((_, layer) => element("th", `${layer + 1}`));
  const rows = adapters[way].map((name, n) => {
    const cells = s.map((of, i) => cell(of[token][n], other?.s[i][token]?.[n]));
    return element("tr", element("th", name), ...cells);
  });
  const caption = way === "" ? "by layer" : `by layer; small: difference from “${other.way}:”`;
  const title = element("caption", "s at “", tokens.querySelectorAll("span")[token].textContent);
  title.append("” ", caption);
  table.replaceChildren(title, element("tr", element("th", "layer"), ...layers), ...rows);
  const sure = `${Math.round(100 * answer.probability)} %`;
  said.textContent = `The fusion answers “${answer.label}” (${sure}); the label is “${truth}”.`;
}

function draw() {
  const { readings, truths } = sentences[sentence.value];
  const other = questions.find((question) => question !== way);
  drawTokens(readings[way].tokens);
  drawTable(readings[way], truths[way], way === "" ? null : { way: other, ...readings[other] });
}

document.getElementById("choices").addEventListener("change", (event) => {
  const { name, value } = event.target;
  if (name === "way") way = value;
  if (name === "token") token = Number(value);
  const focused = name === "token";
  draw();
  if (focused) tokens.querySelector("input:checked").focus();
});
document.querySelector(".bar details").addEventListener("click", (event) => {
  if (event.target.closest("li")) event.currentTarget.open = false;
});
document.querySelector('[name="way"]').checked = true; // a browser may restore another choice
draw();
