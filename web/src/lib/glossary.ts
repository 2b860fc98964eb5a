/* Terms that are explained where they stand, in both languages: what a newcomer must know to read the page. */

import type { Language } from "./words.svelte";

/** [the forms that a text may have, the explanation] */
type Entry = [string[], string];

const ENGLISH: Entry[] = [
  [["attention head", "heads", "head"], "One of several attention computations of a layer, each with its own weights."],
  [["layers", "layer"], "One step of the computation: attention, then a feed-forward network, each added to its input."],
  [["query", "queries"], "The position that collects information; its vector is compared with every key."],
  [["keys", "key"], "A position that can be attended to; its vector is compared with the query."],
  [["values", "value"], "What a position passes on if it is attended to."],
  [["softmax"], "Turns scores into positive weights that sum to 1: exp(score) divided by the sum of all."],
  [["causal mask"], "Hides later tokens from every query, so that a model can generate from left to right."],
  [["position encoding"], "How a model knows the order of tokens: added to the embeddings, rotated into queries and keys, or added to the scores."],
  [["nats", "nat"], "The unit of a loss with the natural logarithm: 0 is certainty, 0.69 is a coin toss."],
  [["loss"], "How improbable the correct tokens are for the model: the mean of −log p."],
  [["beam search"], "Keeps the few most probable hypotheses at every step instead of only one."],
  [["cross-attention"], "Attention of the output tokens to the input."],
  [["self-attention"], "Attention between the tokens of one text."],
  [["encoder"], "Reads the whole input at once."],
  [["decoder"], "Generates the output token by token."],
  [["tokens", "token"], "A piece of text that the model reads or generates: a word, a part of one, or a character."],
  [["temperature"], "A number by which scores are divided before softmax."],
  [["snapshots"], "Copies of the weights that training kept along the way."],
  [["residual stream"], "The vector of a token on its way through the layers; every layer reads it and adds to it."],
  [["logits", "logit"], "The score of one possible output, before softmax."],
  [["feed-forward layer", "feed-forward"], "The part of a layer that transforms every token by itself."],
  [["embedding matrix", "embeddings", "embedding"], "The vectors with which tokens enter the model: one row of the matrix per token."],
  [["activations", "activation"], "A vector that the model computes on the way from input to output."],
  [["principal components"], "The directions in which vectors differ most."],
  [["cosine similarity"], "1: two vectors have the same direction; 0: they are unrelated."],
  [["gradient"], "How fast the loss changes when a number is changed a little."],
];

const KOREAN: Entry[] = [
  [["어텐션 헤드", "헤드"], "한 레이어에서 나란히 계산하는 어텐션 하나. 저마다 자기 가중치를 가집니다."],
  [["레이어"], "계산의 한 단계: 어텐션과 피드포워드 네트워크를 거치며, 각각 입력에 더해집니다."],
  [["쿼리"], "정보를 모으는 위치. 그 벡터를 모든 키와 비교합니다."],
  [["키들", "키"], "주목받을 수 있는 위치. 그 벡터를 쿼리와 비교합니다."],
  [["값 벡터"], "주목받을 때 넘겨주는 값."],
  [["소프트맥스"], "점수를 합이 1인 양수 가중치로 바꿉니다: exp(점수)를 모두의 합으로 나눈 값."],
  [["인과 마스크"], "모든 쿼리에서 뒤 토큰을 가려, 왼쪽에서 오른쪽으로 생성할 수 있게 합니다."],
  [["위치 인코딩"], "모델이 토큰의 순서를 아는 방법: 임베딩에 더하거나, 쿼리와 키를 회전하거나, 점수에 더합니다."],
  [["nat"], "자연로그를 쓰는 손실의 단위: 0은 확실함, 0.69는 동전 던지기."],
  [["손실"], "모델이 정답 토큰에 준 확률이 얼마나 낮은지: −log p의 평균."],
  [["빔 탐색"], "단계마다 하나가 아니라 확률이 높은 가설 몇 개를 남기는 탐색."],
  [["크로스 어텐션"], "출력 토큰이 입력에 주는 어텐션."],
  [["셀프 어텐션"], "한 텍스트의 토큰 사이의 어텐션."],
  [["인코더"], "입력 전체를 한 번에 읽습니다."],
  [["디코더"], "출력을 토큰 하나씩 생성합니다."],
  [["토큰"], "모델이 읽거나 생성하는 텍스트 조각: 단어, 단어의 일부, 또는 글자."],
  [["온도"], "소프트맥스 전에 점수를 나누는 수."],
  [["스냅샷"], "학습 도중에 남겨 둔 가중치 사본."],
  [["잔차 스트림"], "레이어를 지나가는 토큰의 벡터. 레이어마다 이 벡터를 읽고 결과를 더합니다."],
  [["로짓"], "소프트맥스를 적용하기 전, 가능한 출력 하나의 점수."],
  [["피드포워드"], "레이어에서 토큰을 하나씩 따로 변환하는 부분."],
  [["임베딩 행렬", "임베딩"], "토큰이 모델에 들어갈 때의 벡터. 행렬의 한 행이 토큰 하나입니다."],
  [["활성값"], "입력에서 출력까지 모델이 계산하는 벡터."],
  [["주성분 분석"], "벡터들이 가장 많이 다른 방향을 찾는 방법."],
  [["코사인 유사도"], "1이면 두 벡터의 방향이 같고, 0이면 관련이 없습니다."],
  [["그래디언트"], "어떤 수를 조금 바꿀 때 손실이 변하는 정도."],
];

const ENTRIES: Record<Language, Entry[]> = { en: ENGLISH, ko: KOREAN };

export interface Piece {
  text: string;
  meaning: string | null; // of a term
}

/** A text in pieces, with the first occurrence of every term that the glossary explains. */
export function explain(text: string, language: Language): Piece[] {
  const forms = ENTRIES[language].flatMap(([names, meaning]) => names.map((name) => ({ name, meaning })));
  forms.sort((one, other) => other.name.length - one.name.length); // the longest term wins
  const names = forms.map(({ name }) => name.replace(/[.*+?^${}()|[\]\\-]/g, "\\$&")).join("|");
  const [before, after] = language === "en" ? ["\\b", "\\b"] : ["(?<![가-힣])", ""]; // particles follow a Korean noun
  const used = new Set<string>();
  const pieces: Piece[] = [];
  let end = 0;
  for (const match of text.matchAll(new RegExp(`${before}(?:${names})${after}`, "gi"))) {
    const meaning = forms.find(({ name }) => name === match[0].toLowerCase())?.meaning;
    if (!meaning || used.has(meaning)) continue;
    used.add(meaning);
    pieces.push({ text: text.slice(end, match.index), meaning: null }, { text: match[0], meaning });
    end = match.index + match[0].length;
  }
  return [...pieces, { text: text.slice(end), meaning: null }].filter((piece) => piece.text);
}
