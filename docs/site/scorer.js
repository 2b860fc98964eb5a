/* Weights of search results: those of Sphinx, with pages in the language of the query first and those about the project last. */
var Scorer = {
  score: ([page, , , , score]) => {
    const query = new URLSearchParams(location.search).get("q") || "";
    const other = page !== "glossary" && /^ko\/|\.ko$/.test(page) !== /[가-힣]/.test(query);
    return score - other - /^(changelog|contributing)$/.test(page);
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
