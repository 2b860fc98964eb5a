// In place of packages that transformers.js imports but the test does not use.
module.exports = {};
