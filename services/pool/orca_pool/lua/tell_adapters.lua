-- Notes which adapters all ranks of an engine have. The first engine that has a new one makes it the adapter of its name.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, then three for each adapter that its ranks were asked to have: id, fingerprint of its files or '', why
--   they do not have it.
-- Returns 1; nil when the master has lost the lease, and nothing was changed.
local engine, owner, term = unpack(ARGV)
if fenced(engine, owner, term) then
  return false
end
local time, key, lost = now(), HAS .. engine, false
call('DEL', key)
for i = 4, #ARGV, 3 do
  local id, print, why = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local text = call('HGET', ADAPTERS, id)
  local entry = text and cjson.decode(text)
  if entry and print ~= '' and entry.print ~= '' and entry.print ~= print then
    print, why = '', 'its files are others than those that an engine has read before'
  end
  if entry and print ~= '' then
    call('HSET', key, id, '+' .. print)
    if entry.state == 'pending' then -- from now on requests of this name begin with it
      local page = call('HGETALL', ADAPTERS)
      for j = 1, #page, 2 do
        local other = cjson.decode(page[j + 1])
        if other.name == entry.name and other.state == 'current' then
          other.state, other.at = 'retired', int(time)
          call('HSET', ADAPTERS, page[j], cjson.encode(other))
          call('HSET', POOL, 'retired', int(time + ADAPTER_GRACE))
        end
      end
      entry.state, entry.at, entry.print = 'current', int(time), print
      call('HSET', ADAPTERS, id, cjson.encode(entry))
      call('HINCRBY', POOL, 'adapters', 1)
    end
  elseif entry then
    call('HSET', key, id, '-' .. why)
    lost = lost or adapter_lost(id)
  end
end
if lost then
  call('HSET', POOL, 'shrunk', 0) -- requests may wait that name it: the sweep looks at the queue
end
hint(engine, '') -- requests may wait for an adapter that it has now
return 1
