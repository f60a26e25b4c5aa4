-- Notes that an engine has the keys and values of a request that was handed over to it, or computes them: who kept them may let go.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, request id, claim number.
-- Returns nil.
local engine, owner, term, id, claim = unpack(ARGV)
local claim_now, holder = fields(REQUEST .. id, 'claim', 'engine')
if not fenced(engine, owner, term) and claim_now == claim and holder == engine then
  let_go(id)
end
