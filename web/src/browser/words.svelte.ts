/* The words of the page, English and Korean; their types make sure that neither list lacks a sentence. */

const english = {
  loading: "Loading the model … {0} %",
  broken: "The model cannot be loaded: {0}",
  fileHint: "Browsers do not load a model from a file: address. Open this folder with a static server, such as  python -m http.server",
  parameters: "{0} parameters",
  bits: "{0} MB, {1}-bit weights",
  local: "The model runs in this browser. What you enter is not sent anywhere.",
  made: "Made with Regard.",
  theme: "Colours",
  auto: "system",
  light: "light",
  dark: "dark",
  translateTitle: "Input",
  generateTitle: "Prompt",
  classifyTitle: "Text to classify",
  fillTitle: "Text with <mask> where a token is to be predicted",
  tagTitle: "Text to tag",
  predictTitle: "Numbers, {0} per step",
  drop: "Drop an image here, or choose one",
  translate: "Translate",
  generate: "Generate",
  classify: "Classify",
  fill: "Predict",
  tag: "Tag",
  predict: "Forecast",
  stop: "Stop",
  busy: "computing …",
  output: "Output",
  beam: "Beam",
  greedy: "1 (greedy)",
  temperature: "Temperature",
  tokens: "Tokens",
  steps: "Steps",
  took: "{0} ms",
  score: "log P = {0}",
  endedEnd: "The model has ended the text.",
  endedLimit: "The limit of tokens is reached.",
  endedContext: "The context of the model is full.",
  endedStopped: "Stopped.",
  next: "Next-token probabilities",
  nextHint: "Choose a token: its probability, the alternatives, and what it attends to (shaded).",
  attention: "Attention",
  crossHint: "Rows are output tokens, columns input tokens: how much each output token attends to each input token.",
  selfHint: "Rows and columns are the input tokens: how much each one attends to each other.",
  patchHint: "The more orange a patch, the more it is attended to.",
  layer: "Layer",
  head: "Head",
  mean: "mean",
  cropped: "The first {0} of {1} rows and {2} of {3} columns.",
  empty: "Enter a text first.",
  tooLong: "The text has {0} tokens, but the model reads {1}: shorten it.",
  noMask: "Write <mask> where a token is to be predicted.",
  noNumbers: "Enter numbers: {0} per step, separated by spaces or commas.",
  tooFew: "{0} steps are too few: the model reads {1}.",
  failed: "It failed: {0}",
  step: "Step",
  noImage: "This file cannot be read as an image.",
  noText: "This file is not a text in UTF-8.",
};

export type Word = keyof typeof english;

const korean: Record<Word, string> = {
  loading: "모델을 불러오는 중 … {0} %",
  broken: "모델을 불러올 수 없습니다: {0}",
  fileHint: "브라우저는 file: 주소에서 모델을 불러오지 않습니다. 이 폴더를 정적 서버로 여세요. 예:  python -m http.server",
  parameters: "파라미터 {0}개",
  bits: "{0} MB, {1}비트 가중치",
  local: "모델은 이 브라우저에서 실행됩니다. 입력한 내용은 어디로도 전송되지 않습니다.",
  made: "Regard로 만들었습니다.",
  theme: "색상",
  auto: "시스템",
  light: "밝게",
  dark: "어둡게",
  translateTitle: "입력",
  generateTitle: "프롬프트",
  classifyTitle: "분류할 텍스트",
  fillTitle: "예측할 토큰 위치에 <mask>를 넣은 텍스트",
  tagTitle: "태그를 붙일 텍스트",
  predictTitle: "숫자 (스텝마다 {0}개)",
  drop: "이미지를 여기에 놓거나 선택하세요",
  translate: "번역",
  generate: "생성",
  classify: "분류",
  fill: "예측",
  tag: "태그",
  predict: "예측",
  stop: "중지",
  busy: "계산 중 …",
  output: "출력",
  beam: "빔",
  greedy: "1 (탐욕적)",
  temperature: "온도",
  tokens: "토큰 수",
  steps: "스텝 수",
  took: "{0} ms",
  score: "log P = {0}",
  endedEnd: "모델이 텍스트를 끝냈습니다.",
  endedLimit: "토큰 수 한도에 도달했습니다.",
  endedContext: "모델의 컨텍스트가 가득 찼습니다.",
  endedStopped: "중지했습니다.",
  next: "다음 토큰 확률",
  nextHint: "토큰을 선택하면 그 확률과 다른 후보, 그리고 어텐션(음영)이 표시됩니다.",
  attention: "어텐션",
  crossHint: "행은 출력 토큰, 열은 입력 토큰입니다. 각 출력 토큰이 각 입력 토큰에 주는 어텐션을 나타냅니다.",
  selfHint: "행과 열은 모두 입력 토큰입니다. 각 토큰이 다른 토큰에 주는 어텐션을 나타냅니다.",
  patchHint: "주황색이 진한 패치일수록 어텐션이 큽니다.",
  layer: "레이어",
  head: "헤드",
  mean: "평균",
  cropped: "{1}행 중 처음 {0}행, {3}열 중 처음 {2}열입니다.",
  empty: "먼저 텍스트를 입력하세요.",
  tooLong: "텍스트는 {0}토큰이지만 모델은 {1}토큰까지 읽습니다. 줄여 주세요.",
  noMask: "예측할 토큰 위치에 <mask>를 넣으세요.",
  noNumbers: "숫자를 입력하세요. 스텝마다 {0}개, 공백이나 쉼표로 구분합니다.",
  tooFew: "{0}스텝은 부족합니다. 모델은 {1}스텝을 읽습니다.",
  failed: "실패했습니다: {0}",
  step: "스텝",
  noImage: "이 파일은 이미지로 읽을 수 없습니다.",
  noText: "이 파일은 UTF-8 텍스트가 아닙니다.",
};

const LISTS = { en: english, ko: korean };
export type Language = keyof typeof LISTS;

/** Storage is refused in some private windows. */
function kept(): string | null {
  try {
    return localStorage.getItem("regard.language");
  } catch {
    return null;
  }
}

const chosen = kept();
const first = chosen === "ko" || (chosen !== "en" && navigator.language.startsWith("ko")) ? "ko" : "en";
let language = $state<Language>(first);
document.documentElement.lang = first;

export function currentLanguage(): Language {
  return language;
}

export function setLanguage(next: Language): void {
  language = next;
  document.documentElement.lang = next;
  try {
    localStorage.setItem("regard.language", next);
  } catch {
    // it is for this visit only
  }
}

export function say(word: Word, ...values: (string | number)[]): string {
  return LISTS[language][word].replace(/\{(\d)\}/g, (_, index) => String(values[Number(index)] ?? ""));
}

export function isWord(code: string): code is Word {
  return code in english;
}
