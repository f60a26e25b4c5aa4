-- Notes which adapters all ranks of an engine have. The first engine that has a new one makes it the adapter of its name. Files
-- that were written over make a new id once all engines have read them.
--
-- KEYS: the pool hash.
-- ARGV: engine, owner, term, then three for each adapter that its ranks were asked to have: id, fingerprint of its files or '', why
--   they do not have it.
-- Returns 1; nil when the master has lost the lease, and nothing was changed.

-- Where every engine that has formed says `why`, the files of an adapter were written over with the same ones everywhere: its name
-- goes on with a new id, which has the new fingerprint, and what began with the old one ends. Returns whether they were.
local function written_over(id, entry, print, why)
  for _, other in ipairs(call('ZRANGE', ENGINES, 1, '+inf', 'BYSCORE')) do
    if other ~= ARGV[1] and call('HGET', HAS .. other, id) ~= '-' .. why then
      return false
    end
  end
  local new = new_adapter_id(entry.name)
  call('HSET', POOL, 'shrunk', 0) -- requests may wait that name the old id: the sweep looks at the queue
  call('HINCRBY', POOL, 'adapters', 1)
  call('HDEL', ADAPTERS, id)
  if entry.state == 'current' then
    entry.print = print
    put_adapter(new, entry, 'current')
  end
  return true
end

local engine, owner, term = unpack(ARGV)
if fenced(engine, owner, term) then
  return false
end
local key, lost = HAS .. engine, false
call('DEL', key)
for i = 4, #ARGV, 3 do
  local id, print, why = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local text = call('HGET', ADAPTERS, id)
  local entry = text and cjson.decode(text)
  if entry and print ~= '' and entry.print ~= '' and entry.print ~= print then
    why = 'its files (' .. print .. ') are others than those that an engine has read before'
    entry = not written_over(id, entry, print, why) and entry
    print = ''
  end
  if entry and print ~= '' then
    call('HSET', key, id, '+' .. print)
    if entry.state == 'pending' then -- from now on requests of this name begin with it
      local page = call('HGETALL', ADAPTERS)
      for j = 1, #page, 2 do
        local other = cjson.decode(page[j + 1])
        if other.name == entry.name and other.state == 'current' then
          put_adapter(page[j], other, 'retired')
        end
      end
      entry.print = print
      put_adapter(id, entry, 'current')
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
