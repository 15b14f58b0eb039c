import{$ as ke,A as bt,B as vt,C as J,D as S,E as Bt,F as yt,G as xt,H as $e,I as T,J as Pt,K as W,L as de,M as pe,N as me,O as fe,P as he,Q as qt,R as wt,S as ge,T as be,U as ve,V as ye,W as Dt,X as V,Y as kt,Z as xe,_ as we,b as Z,c as ot,d as ae,e as ne,f as ft,g as oe,h as G,i as At,j as re,k as Nt,l as ie,m as B,n as Lt,o as le,p as Rt,q as Q,r as ht,s as m,t as ce,u as ue,v as P,w as It,x as tt,y as gt,z as F}from"./chunk-XDXTUIYO.js";import{A as se,D as mt,a as zt,b as O,c as R,d as $t,e as r,f as g,g as w,h as I,i as E,j as dt,k as v,l as U,m as pt,n as nt,o as jt,p as k,q as Xt,w as Zt,x as Qt,y as te,z as ee}from"./chunk-PCYESTOY.js";var Kt=["mma","fma","wgmma","mfma","compute"],ts=["exponentials","transform","update","packing"],es={launch:"var(--launch)",exposed:"var(--exposed)"};function M(t,e){let s=t.levels.map(o=>o.name),[a,n]=t.tile_levels;return e===n?"var(--thread)":e===a?"var(--block)":e===s[0]?"var(--outer)":s.includes(e)?s.indexOf(e)<s.indexOf(a)?"var(--between)":"var(--inner)":Kt.includes(e)||e==="arithmetic"?"var(--compute)":ts.includes(e)?"var(--special)":es[e]??"var(--other)"}var q=(t,e)=>`color-mix(in oklab, ${M(t,e)} 70%, var(--ink))`;var st=560,C=300,Mt=70,_t=78,H=12,K=36,et={x:st-42,columns:2,rows:15},D=4,Oe=t=>t.outcome==="accepted",ss=t=>t.outcome==="rejected",Ht=(t,e)=>t.kind==="scale-up"&&!e.saturated;function as(t,e){let s=[];for(let a=e;a!=null;a=t[a].parent)s.push(a);return s}function ns(t){return t.filter(s=>s.traffic_bytes>0).length?{read:s=>s.traffic_bytes,show:w,title:"traffic from the level outside"}:{read:s=>s.seconds,show:g,title:"estimate of the best program with it"}}var Me=(t,e,s,a)=>n=>s+(a-s)*Math.log(n/t)/Math.log(e/t);function _e(t,e){let s=t.filter(a=>a>0);return s.length?[Math.min(...s)/e,Math.max(...s)*e]:[1,2]}function os([t,e]){let s=Math.ceil(Math.log2(t)),a=Math.floor(Math.log2(e)),n=Math.ceil((a-s+1)/8)||1;return Array.from({length:Math.max(0,Math.floor((a-s)/n)+1)},(o,i)=>2**(s+i*n))}function rs(t,e){let s=ns(t),a=t.filter($=>s.read($)>0),n=_e([...a.map($=>$.footprint_bytes),e],1.5),o=_e(a.map(s.read),1.2),i=Me(...n,Mt,st-_t),u=Me(...o,C-K,H),d=0;return{points:t.map($=>{if($.footprint_bytes>0&&s.read($)>0)return[i($.footprint_bytes),u(s.read($))];let x=d++%(et.columns*et.rows);return[et.x+16*(x%et.columns),H+24+15*Math.floor(x/et.columns)]}),x:i,y:u,xs:n,ys:o,upright:s,refused:d}}function Te({tried:t,now:e}){let{device:s}=m.value,a=t.steps,n=M(s,t.level),o=t.capacity_bytes,{points:i,x:u,y:d,xs:l,ys:$,upright:x,refused:c}=rs(a,o),f=new Set(as(a,e)),h=new Set((T.value?.found??[]).filter(p=>p.search===S.value).map(p=>p.step)),b=`${k(a.length,"tile")} tried for ${t.level}: footprint against ${x.title}`;return r`<svg viewBox=${`0 0 ${st} ${C}`} class="landscape" role="img" aria-label=${b} data-testid="tiles">
    ${os(l).map(p=>r`<line x1=${u(p)} x2=${u(p)} y1=${H} y2=${C-K} class="grid" />
      <text x=${u(p)} y=${C-K+13} class="tick" text-anchor="middle">${w(p)}</text>`)}
    <line x1=${Mt} x2=${st-_t} y1=${C-K} y2=${C-K} class="axis-line" />
    <text x=${(Mt+st-_t)/2} y=${C-4} class="label" text-anchor="middle">footprint in ${t.level}</text>
    <text x=${-(C-K)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">${x.title}</text>
    ${[$[0]*1.2,Math.sqrt($[0]*$[1]),$[1]/1.2].map(p=>r`<text x=${Mt-5} y=${d(p)+3} class="tick" text-anchor="end">${x.show(p)}</text>`)}
    ${o>0&&r`<rect x=${u(o)} y=${H} width=${st-_t-u(o)+14} height=${C-K-H} class="wall" />
      <line x1=${u(o)} x2=${u(o)} y1=${H} y2=${C-K} style=${`stroke:${n};stroke-width:1.5`} />
      <text x=${u(o)-4} y=${H+8} class="tick" text-anchor="end" style=${`fill:${q(s,t.level)}`}>capacity ${w(o)}</text>`}
    ${c>0&&r`<text x=${et.x+8} y=${H+8} class="tick" text-anchor="middle">refused early</text>`}
    ${a.map((p,_)=>p.parent!=null&&r`<line x1=${i[p.parent][0]} y1=${i[p.parent][1]} x2=${i[_][0]} y2=${i[_][1]}
      class=${f.has(_)?"edge on":_<=e?"edge":"edge later"} style=${f.has(_)?`stroke:${n}`:""} />`)}
    ${a.map((p,_)=>{let[A,N]=i[_];return r`<g class=${_>e?"spot later":"spot"} onClick=${()=>V(S.value,_)}>
        <circle cx=${A} cy=${N} r="9" fill="transparent" />
        ${ss(p)?r`<path d=${`M${A-D} ${N-D}l${2*D} ${2*D}m0-${2*D}l-${2*D} ${2*D}`} class="cross" />`:r`<circle cx=${A} cy=${N} r=${D} style=${Ht(t,p)?`fill:var(--paper);stroke:${n};stroke-width:1.5`:`fill:${n}`} />`}
        ${h.has(_)&&r`<circle cx=${A} cy=${N} r="8" class="won" />`}${_===e&&r`<circle cx=${A} cy=${N} r="11" class="now" />`}
        <title>${nt(t.axes,p.tile)}: ${p.footprint_bytes>0?w(p.footprint_bytes):"no footprint"}, ${p.limit?.rule??p.outcome}${p.seconds?`, ${g(p.seconds)}`:""}</title>
      </g>`})}
  </svg>`}var Se=({tried:t})=>r`<ul class="legend">
  ${t.kind==="scale-up"&&r`<li><i class="ring" style=${`--c:${M(m.value.device,t.level)}`}></i>fits</li>
    <li><i class="disc" style=${`--c:${M(m.value.device,t.level)}`}></i>fits and is large enough</li>`}
  <li><i class="bad">✕</i>refused</li><li><i class="ring" style="--c:var(--ink)"></i>of the chosen program</li></ul>`;var Ut=168,is=64,ls=["k","inner","reduce","tap"];function cs({roles:t,extents:e}){let s=i=>t.indexOf(i);if(s("m")>=0&&s("n")>=0)return[s("m"),s("n"),s("k")];let a=t.map((i,u)=>u).filter(i=>!ls.includes(t[i])),[n=0,o=n]=a.sort((i,u)=>e[u]-e[i]).slice(0,2).sort((i,u)=>i-u);return[n,o,s("k")]}function us(t,e){let[s,a]=m.value.device.tile_levels,n=T.value?.program.tiles,o=n&&Object.keys(n[s]??{}).join()===t.axes.join(),i=u=>t.axes.map(d=>n[u]?.[d]??1);return t.level===s?{block:e.tile,thread:e.base??t.base??(o?i(a):e.tile)}:{block:o?i(s):e.tile,thread:e.tile}}function $s({name:t,size:e,inner:s,colour:a,innerColour:n,axes:[o,i,u],names:d,depth:l,note:$}){let x=Math.max(e[o],e[i]),c=l?Math.min(l,x):0,f=Ut/(x+c),h=Math.max(3,e[i]*f),b=Math.max(3,e[o]*f),p=c&&Math.max(4,c*f),_=s?Math.max(2,Math.min(h,s[i]*f)):0,A=s?Math.max(2,Math.min(b,s[o]*f)):0,N=(L,ut)=>ut>3&&L/ut>1.5?Array.from({length:Math.min(Math.round(L/ut),is)-1},(Ta,Qe)=>ut*(Qe+1)):[],Ze=`${t}: ${d[o]} ${e[o]} by ${d[i]} ${e[i]}${l?`, ${d[u]} ${l}`:""}`;return r`<figure><svg viewBox=${`-20 -16 ${Ut+24} ${Ut+26}`} role="img" aria-label=${Ze}>
    ${p>0&&r`<rect y=${p} width=${p} height=${b} class="strip" /><rect x=${p} width=${h} height=${p} class="strip" />
      <text x=${p/2} y=${p-3} class="tick" text-anchor="middle">${p>14?`${d[u]} ${l}`:""}</text>`}
    <g transform=${`translate(${p} ${p})`}>
      <rect width=${h} height=${b} style=${`fill:color-mix(in oklab, ${a} 13%, transparent);stroke:${a};stroke-width:1.5`} />
      ${N(h,_).map(L=>r`<line x1=${L} x2=${L} y2=${b} class="hair" style=${`stroke:${a}`} />`)}
      ${N(b,A).map(L=>r`<line y1=${L} y2=${L} x2=${h} class="hair" style=${`stroke:${a}`} />`)}
      ${s&&r`<rect width=${_} height=${A} style=${`fill:${n}`} opacity="0.85" />`}</g>
    <text x=${p+h/2} y="-5" class="tick" text-anchor="middle">${d[i]} ${e[i]}</text>
    <text transform=${`translate(-7 ${p+b/2}) rotate(-90)`} class="tick" text-anchor="middle">${d[o]} ${e[o]}</text>
  </svg><figcaption><b style=${`color:color-mix(in oklab, ${a} 70%, var(--ink))`}>${t}</b><span>${$}</span></figcaption></figure>`}function ds({axis:t,role:e,thread:s,block:a,whole:n}){let o=i=>n>1?Math.min(1,Math.log2(Math.max(1,i))/Math.log2(n)):1;return r`<div class="ruler"><span>${t}${e!==t&&r`<small>${e}</small>`}</span>
    <svg width="100%" height="12" role="img" aria-label=${`${t}: ${s} of ${a} of ${n}`}>
      <rect y="4" height="4" width="100%" class="track" /><rect y="2" height="8" width=${`${100*o(a)}%`} style="fill:var(--block)" opacity=".75" />
      <rect height="12" width=${`${Math.max(1,100*o(s))}%`} style="fill:var(--thread)" /></svg>
    <em>${s} <i>▸</i> ${a} <i>▸</i> ${n}</em></div>`}function Ce({tried:t,tile:e}){let{device:s}=m.value,[a,n]=s.tile_levels,o=cs(t),[i,u,d]=o,{block:l,thread:$}=us(t,e),x=t.extents,c=(h,b)=>Math.ceil(h[i]/b[i])*(u===i?1:Math.ceil(h[u]/b[u])),f=[{name:"whole result",size:x,inner:l,colour:"var(--outer)",innerColour:"var(--block)",note:k(c(x,l),"tile")},{name:`task in ${a}`,size:l,inner:$,colour:"var(--block)",innerColour:"var(--thread)",depth:d>=0?l[d]:0,note:k(c(l,$),"tile")},{name:`tile in ${n}`,size:$,colour:"var(--thread)",note:t.unit}];return r`<div class="nested" data-testid="tile"><div class="frames">${f.map(h=>r`<${$s} ...${h} axes=${o} names=${t.axes} />`)}</div>
    <div class="rulers">${t.axes.map((h,b)=>r`<${ds} axis=${h} role=${t.roles[b]} thread=${$[b]} block=${l[b]} whole=${x[b]} />`)}</div></div>`}var ps=".cm-editor, input, select, textarea";function Gt({rule:t,needs:e,has:s}){let n=m.value.device.levels.some(({name:o})=>t===o||t.startsWith(`${o} `))||/memory|cache|page/.test(t)?w:dt;return`${t}: needs ${n(e)}, there is ${n(s)}`}function ms(t,e){let s=t.steps[e.parent];if(!s)return t.kind==="scale-up"?"Start":"Tried";if(e.axis==null)return`Made of ${nt(t.axes,s.tile)}`;let a=s.tile[e.axis],n=e.tile[e.axis];return`${t.axes[e.axis]} ${n>a?"grew":"shrank"} ${a} → ${n}`}function fs({tried:t,tile:e}){let s=ms(t,e),a=e.footprint_bytes>0&&t.capacity_bytes>0?`, ${v(e.footprint_bytes/t.capacity_bytes)} of the capacity`:"";if(e.outcome==="rejected")return r`<b>${s}</b>: <span class="bad">stopped by ${e.limit?Gt(e.limit):e.outcome}</span>.`;if(!Oe(e))return r`<b>${s}</b>: not aligned yet (${Gt(e.limit)}), so it grows on.`;let n=e.footprint_bytes>0?`fits in ${w(e.footprint_bytes)}${a}.`:"fits.",o=t.kind!=="scale-up"?"":Ht(t,e)?" Memory is still slower than compute: growing pays.":" Compute covers its memory time: it is large enough.";return r`<b>${s}</b>: ${n}${o}${e.seconds>0&&r` The best program with it takes <b>${g(e.seconds)}</b>.`}`}function hs({tried:t,tile:e}){if(!e.growth?.length)return null;let s=Math.max(1e-30,...e.growth.map(a=>a.reuse??0));return r`<table class="growth"><caption>It could grow along</caption>
    <thead><tr><th>axis</th><th>to</th><th class="r">needs</th><th class="r">moves</th><th>traffic saved per byte</th><th>outcome</th></tr></thead>
    <tbody>${e.growth.map((a,n)=>r`<tr class=${n===0?"first":""}>
      <th scope="row">${t.axes[a.axis]}</th><td>${a.extent}</td>
      <td class="r">${a.footprint_bytes>0?w(a.footprint_bytes):"–"}</td>
      <td class="r">${a.traffic_bytes>0&&e.traffic_bytes>0?v(a.traffic_bytes/e.traffic_bytes):"–"}</td>
      <td class="meter"><i style=${`width:${a.reuse==null?100:Math.max(1,100*a.reuse/s)}%;background:${M(m.value.device,t.level)}`}></i></td>
      <td class=${a.limit?"bad":"quiet"}>${a.limit?Gt(a.limit):a.reuse==null?"costs nothing":n===0?"tried first":""}</td></tr>`)}</tbody></table>`}function gs(){let t=new Set((T.value?.found??[]).map(s=>s.search)),e=new Map;return m.value.searches.forEach((s,a)=>{let n=[s.group,s.unit,s.view,s.family].filter(Boolean).join(" · ");e.set(n,[...e.get(n)??[],[s,a]])}),r`<select class="picker" aria-label="search" value=${S.value} onChange=${s=>V(Number(s.target.value),0)}>
    ${[...e].map(([s,a])=>r`<optgroup label=${s}>${a.map(([n,o])=>r`<option value=${o} selected=${o===S.value}>
      ${t.has(o)?"● ":""}${n.kind} · ${n.level}${n.base?` on ${n.base.filter(i=>i>1).join("×")||"1"}`:""}: ${k(n.steps.length,"tile")}</option>`)}</optgroup>`)}</select>`}var bs=()=>r`<div class="chain" role="group" aria-label="tiles of the chosen program">
  ${(T.value?.found??[]).map(t=>{let{level:e}=m.value.searches[t.search];return r`<button class=${t.search===S.value&&t.step===Bt.value?"on":""} style=${`--c:${q(m.value.device,e)}`} onClick=${()=>V(t.search,t.step)}>chosen ${e}</button>`})}</div>`;function Ee(){let t=m.value.searches[S.value],e=(t?.steps.length??0)-1,s=Math.min(Bt.value,e),a=o=>V(S.value,Math.max(0,Math.min(e,s+o)));if(R(()=>{let o=i=>{let u={ArrowRight:1,ArrowLeft:-1}[i.key];u&&!i.target.closest?.(ps)&&!i.altKey&&!i.metaKey&&!i.ctrlKey&&a(u)};return addEventListener("keydown",o),()=>removeEventListener("keydown",o)}),e<0)return r`<section class="panel"><h2>How the tile grew</h2><p class="quiet">This program has no tiles to choose.</p></section>`;let n=t.steps[s];return r`<section class="panel" aria-labelledby="construction-title" data-testid="stepper">
    <header><h2 id="construction-title">How the tile grew</h2><${gs} /><${bs} /></header>
    <div class="two"><div>
        <${Te} tried=${t} now=${s} /><${Se} tried=${t} />
        <div class="scrubber">
          <button data-testid="step-previous" aria-label="previous step" disabled=${s===0} onClick=${()=>a(-1)}>←</button>
          <input type="range" min="0" max=${e} value=${s} aria-label="step" onInput=${o=>V(S.value,Number(o.target.value))} />
          <button data-testid="step-next" aria-label="next step" disabled=${s===e} onClick=${()=>a(1)}>→</button>
          <span>${s+1} of ${e+1}</span></div>
        <p class="saying" aria-live="polite" data-testid="step"><code>${nt(t.axes,n.tile)}</code> <${fs} tried=${t} tile=${n} /></p>
        <${hs} tried=${t} tile=${n} /></div>
      <${Ce} tried=${t} tile=${n} /></div>
  </section>`}var vs=10;async function ys(){let t=W.peek(),e=()=>t===W.peek();try{let s=await mt("/v1/kernels:compile",t);for(;e()&&(vt.value=s,!s.done);)s=await ee(`/v1/${s.name}?wait=${vs}`);e()&&s.response&&await pe(s.response,e)}catch(s){e()&&(vt.value={done:!0,error:Zt(s)})}}function xs(t){if(!t)return"";if(t.error)return`failed: ${t.error.detail}`;let{stage:e,cache:s,queue_position:a,waiting_for:n}=t.metadata;return t.done?s==="hit"?"compiled before":"compiled":n?`no worker takes from ${n}`:a>0?`queued behind ${a}`:e}function je(){let t=vt.value,e=t&&!t.done;return r`<div class="compile">
    <button data-testid="compile" disabled=${!xe.value||e} onClick=${ys}>Compile</button>
    <span data-testid="status" role="status" class=${t?.error?"bad":"quiet"}>${e&&r`<i class="busy"></i>`}${xs(t)}</span>
  </div>`}var Ae=2;function ks({name:t}){let e=le.value[t]??1;return r`<label class="slider"><span>${t}</span>
    <input type="range" min=${-Ae} max=${Ae} step=${.5} value=${Math.log2(e)} aria-label=${t} aria-valuetext=${U(e)}
      onChange=${s=>be(t,2**Number(s.target.value))} /><em>${U(e)}</em></label>
    ${Rt.value?.name===t&&r`<p class="quiet" data-testid="held" role="status">no further: ${Rt.value.reason}</p>`}`}var Ne=({kernels:t})=>JSON.stringify(t.map(e=>e.program?.tiles??e.tiles));function Ms(){let t=gt.value.find(a=>a.target===B.value)?.candidates?.[0],e=m.value?.programs[0];if(!Q.value||!t||ce.value!==W.value)return null;let s=1-e.seconds/t.seconds;return r`<p data-testid="effect" role="status">${g(t.seconds)} → <b>${g(e.seconds)}</b>,${" "}
    ${Math.abs(s)<5e-4?"as before":`${v(Math.abs(s))} ${s>0?"less":"more"}`};${" "}
    ${Ne(t)===Ne(e)?"the tiles stay":"other tiles win"}.</p>`}function _s(){let t=Q.value??Lt.value,[e,s]=O(null),[a,n]=O(null),o=async u=>{s(u.target.value);try{let{hardware:d}=await mt("/v1/hardware:validate",{hardware:u.target.value});n(null),s(null),ge(d)}catch(d){n(d.problem??{detail:d.message,errors:[]})}},i=a&&(a.errors.length?a.errors:[{message:a.detail}]);return r`<details><summary>as text</summary>
    <textarea aria-label="spec as text" rows="12" spellcheck="false" value=${e??JSON.stringify(t,null,1)} onChange=${o}></textarea>
    ${i?.map(u=>r`<p class="bad" role="alert">${u.line&&r`<b>${u.line}:${u.column}</b> `}${u.message}</p>`)}</details>`}function Le(){let t=Q.value??Lt.value,[e,s]=O(!1),a=({currentTarget:{open:n}})=>{s(n),n&&ve()};return r`<details class="spec" data-testid="spec" open=${e||Q.value!==null} onToggle=${a}>
    <summary>Another device: what if …</summary>
    ${t&&r`${Object.keys(oe(t)).map(n=>r`<${ks} name=${n} />`)}<${Ms} />
      ${Q.value&&ht.value.some(n=>n.id===B.value)&&r`<button onClick=${()=>wt(B.value)}>as it is</button>`}<${_s} />`}
  </details>`}var Os=180,Ts=["float32","float16","bfloat16","float64","float8_e4m3","float8_e5m2","int8","uint8","int16","int32","int64","bool"];function Ss(){let t=$t(),e=$t(),s=$t();R(()=>{let o,i=!1;return import("./editor-VSO2J4KC.js").then(({createEditor:u})=>{if(i)return;let d=l=>{clearTimeout(o),o=setTimeout(()=>fe(s.current=l),Os)};t.current.textContent="",e.current=u(t.current,G.peek(),d),e.current.mark(P.peek()?.errors??[])}),()=>{i=!0,e.current?.destroy()}},[]);let a=G.value,n=P.value;return R(()=>{a!==s.current&&e.current?.show(a)},[a]),R(()=>e.current?.mark(n?.errors??[]),[n]),r`<div class=${n?.errors.some(o=>o.line)?"editor wrong":"editor"} ref=${t}><pre>${G.peek()}</pre></div>`}function Cs(){let t=P.value,e=ue.value,s=t?.errors.length?t.errors:t?[{message:t.detail}]:[];return r`<div class="diagnostics" data-testid="diagnostics" role="status">
    ${s.map(a=>r`<p><b>${a.line?`${a.line}:${a.column}`:Es(a.pointer)??t.code}</b> ${a.message}
      ${a.hint&&r`<span>${a.hint}</span>`}</p>`)}
    ${t&&!kt.value&&r`<p><button data-testid="again" onClick=${we}>ask again</button></p>`}
    ${It.value&&r`<p class="bad" data-testid="trouble">${It.value}</p>`}
    ${tt.value&&r`<p class="quiet">explaining…</p>`}
    ${!t&&!tt.value&&e!=null&&r`<p class="quiet">explained in ${Math.round(e)} ms</p>`}
  </div>`}var Es=t=>t?.replace(/^\/inputs\//,"").replaceAll("/"," "),js=t=>t.trim()?t.split(/[^\d]+/).filter(Boolean).map(Number):[];function As(){let t=Object.entries(At.value);return t.length?r`<table class="inputs"><caption class="unseen">Inputs</caption>
    <thead><tr><th>input</th><th>type</th><th>shape</th><th title="does not change from call to call, such as weights">fixed</th></tr></thead>
    <tbody>${t.map(([e,{dtype:s,shape:a}])=>r`<tr key=${e}>
      <th scope="row">${e}</th>
      <td><select aria-label=${`type of ${e}`} value=${s} onChange=${n=>qt(e,{dtype:n.target.value,shape:a})}>
        ${[...new Set([...Ts,s])].map(n=>r`<option selected=${n===s}>${n}</option>`)}</select></td>
      <td><input aria-label=${`shape of ${e}`} value=${a.join(" × ")} inputmode="numeric"
        onChange=${n=>qt(e,{dtype:s,shape:js(n.target.value)})} /></td>
      <td><input type="checkbox" aria-label=${`${e} is constant`} checked=${re.value.includes(e)}
        onChange=${n=>ye(e,n.target.checked)} /></td>
    </tr>`)}</tbody></table>`:null}function Ns(){let t={...Nt.value&&{outputs:Nt.value},...ie.value};return Object.keys(t).length?r`<p class="quiet" data-testid="options">${Object.entries(t).map(([e,s])=>`${e} ${typeof s=="string"?s:JSON.stringify(s)}`).join(" · ")}
    <button onClick=${he}>without</button></p>`:null}function Ls(){let t=m.value?.device;return t?r`<section class="device"><h2>${t.name}</h2>
    <p class="quiet">${k(t.cores,"core")} · ${t.levels.filter(e=>e.name!==t.tile_levels[1]).map(e=>r`<span style=${`color:${q(t,e.name)}`}>${e.name} ${E(e.bandwidth_bytes_per_s,"B")}${e.assumed?"?":""}</span> `)}</p></section>`:null}function Rs(t){let e=t.candidates?.[0];return e?{target:t.target,seconds:e.seconds,bound:e.bound,floor:t.floor.seconds}:{target:t.target,refused:t.error?.detail??"no candidate"}}var Is=8;function Bs(){let t=gt.value.map(Rs),e=t.length?t:ht.value.map(o=>({target:o.id}));e.sort((o,i)=>(o.seconds??1/0)-(i.seconds??1/0));let s=Is*(e[0]?.seconds??1),a=Math.min(s,Math.max(...e.map(o=>o.seconds??0))),n=o=>`${Math.min(100,100*o/a)}%`;return r`<section class="elsewhere" data-testid="target"><h2>Devices</h2>
    ${e.map(o=>r`<button key=${o.target} data-testid=${`target-${o.target}`} class=${o.target===B.value?"on":""}
      aria-pressed=${o.target===B.value} title=${o.refused??`bound by ${o.bound}`} onClick=${()=>wt(o.target)}>
      <span>${Xt(o.target)}</span>
      ${o.seconds?r`<svg height="10" width="100%" aria-hidden="true">
          <rect width=${n(o.seconds)} height="10" class=${o.seconds>a?"estimate cut":"estimate"} />
          <rect width=${n(o.floor)} height="10" class="floor" /></svg><em>${g(o.seconds)}</em>`:r`<small>${o.refused?"refused":""}</small><em></em>`}
    </button>`)}
    ${t.length>0&&r`<p class="quiet">Dark: no tiles go below this on the device.</p>`}</section>`}function Re(){let t=ft.findIndex(e=>e.expression===G.value&&e.target===B.value&&JSON.stringify(e.inputs)===JSON.stringify(At.value));return r`<aside class="desk" aria-label="Program">
    <select class="examples" aria-label="example" value=${t} onChange=${e=>me(ft[e.target.value])}>
      ${t<0&&r`<option value="-1" selected>examples…</option>`}
      ${ft.map((e,s)=>r`<option value=${s} selected=${s===t}>${e.name}</option>`)}</select>
    <${Ss} /><${Cs} /><${As} /><${Ns} /><${je} /><${Ls} /><${Le} /><${Bs} />
  </aside>`}var Ps="[\\x21-\\x7e]+";function Ie({load:t}){return Qt.value?r`<form class="key" onSubmit=${s=>{s.preventDefault(),te(new FormData(s.currentTarget).get("key")),t()}}>
    <label>This service needs an API key <input name="key" type="password" autocomplete="off" required pattern=${Ps} title="letters, digits and signs of ASCII, without spaces" autofocus /></label>
    <button>use it in this tab</button>
  </form>`:null}var Be=()=>r`<svg width="0" height="0" aria-hidden="true" class="unseen"><defs>
  <pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="5" height="5" style="fill:var(--paper-2)" /><rect width="2.4" height="5" style="fill:var(--exposed)" />
  </pattern></defs></svg>`,y=({seconds:t,fraction:e=1})=>e*t,qs=(t,e)=>y(e)-y(t),Ds=t=>t.reduce((e,s)=>e+y(s),0),Y=(t,e)=>t.terms.filter(s=>s.combines===e&&y(s)>0).sort(qs);function rt(t){let e=Y(t,"sums");return[...Y(t,"overlaps").map(a=>[a]),...e.length?[e]:[]].map(a=>({terms:a,name:a.map(n=>n.name).join(" + "),seconds:Ds(a)})).sort((a,n)=>n.seconds-a.seconds)}var Jt=t=>[...Y(t,"adds"),...Y(t,"after")];function Ks(t){let e=[],s=[],a=0,n=(o,i)=>{e.push({name:o,seconds:i,start:a}),a+=i};for(let o of t){let i=a,[u,...d]=rt(o);for(let $ of u?.terms??[])n($.name,y($));for(let $ of d)s.push({name:$.terms[0].name,label:$.name,seconds:$.seconds,at:i+$.seconds});for(let $ of Y(o,"adds"))n($.name,y($));let[l]=Y(o,"floor");l&&y(l)>a-i&&n(l.name,y(l)-(a-i));for(let $ of Y(o,"after"))n($.name,y($))}return{parts:e,marks:s}}function Ot({kernels:t,device:e,longest:s,height:a=14}){let{parts:n,marks:o}=Ks(t),i=l=>`${100*l/s}%`,u=l=>l==="exposed"?"url(#hatch)":M(e,l),d=n.map(l=>`${l.name} ${g(l.seconds)}`).join(", then ");return r`<svg class="terms" width="100%" height=${a} role="img" aria-label=${d}>
    ${n.map(l=>r`<rect x=${i(l.start)} width=${i(l.seconds)} height=${a} style=${`fill:${u(l.name)}`}>
      <title>${l.name}: ${g(l.seconds)}</title></rect>`)}
    ${n.slice(1).map(l=>r`<line x1=${i(l.start)} x2=${i(l.start)} y2=${a} class="cut" />`)}
    ${o.map(l=>r`<line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} class="under" />
      <line x1=${i(l.at)} x2=${i(l.at)} y1="2" y2=${a} style=${`stroke:${u(l.name)};stroke-width:2`}>
        <title>${l.label} would be done after ${g(l.seconds)}</title></line>`)}
  </svg>`}function Pe({kernels:t,device:e}){let s=new Map;for(let a of t.flatMap(n=>n.terms))s.set(a.name,(s.get(a.name)??0)+y(a));return r`<ul class="legend">${[...s].map(([a,n])=>r`<li>
    <i class=${a==="exposed"?"dot hatched":"dot"} style=${`--c:${M(e,a)}`}></i>${a}<em>${g(n)}</em></li>`)}</ul>`}var Wt=6,Hs=2.5,Us=["contraction","attention",""],Gs=[["split_k",1,t=>`split-k ${t}`],["stages",1,t=>`${t} stages`],["stream_k",0,t=>`stream-k ${t}`],["pingpong",0,()=>"ping-pong"],["blocks",0,t=>`${t} persistent`],["raster",1,t=>`raster ${t}`]];function Fs(t){let e=Gs.filter(([a,n])=>t[a]>n).map(([a,,n])=>n(t[a])),s=[t.cluster_m,t.cluster_n,t.cluster_k].filter(a=>a>1);return[...e,s.length&&`cluster ${s.join("×")}`].filter(Boolean).join(", ")}var Js=t=>k(Z(t).length,"kernel")+(ot(t).length?`, ${ot(t).length} once`:""),qe=(t,e)=>Object.entries(t.tiles[e]??{}).filter(([,s])=>s>1).map(([s,a])=>r`<span class="axis">${s}<b>${a}</b></span>`);function De(){let[t,e]=O(!1),{device:s,programs:a,constructions:n}=m.value,[o,i]=s.tile_levels,u=n.reduce((c,f)=>c+f.tiles_visited,0),d=n.flatMap(c=>c.refusals),l=t||J.value>=Wt?a:a.slice(0,Wt),$=Math.min(Math.max(...l.map(c=>c.seconds)),Hs*a[0].seconds),x=(c,f)=>{let h={ArrowDown:f+1,ArrowUp:f-1,Enter:f," ":f}[c.key];h===void 0||!l[h]||(c.preventDefault(),Dt(h),c.currentTarget.parentNode.children[h].focus())};return r`<section class="panel" aria-labelledby="programs-title">
    <header><h2 id="programs-title">Ranked programs</h2><span class="quiet">the best of ${k(u,"tile")} · ↑ ↓ choose</span></header>
    <div class="scroll" tabindex="0" role="group" aria-label="table of programs"><table class="programs" data-testid="programs">
      <thead><tr><th class="r">#</th><th>unit</th><th>${o} tile</th><th>${i} tile</th><th>options</th><th class="wide">terms</th><th class="r">estimate</th><th class="r">waves</th><th class="r">occ.</th></tr></thead>
      <tbody>${l.map((c,f)=>{let h=ae(c),b=h.program;return r`<tr key=${f} tabindex=${f===J.value?0:-1} aria-current=${f===J.value} data-testid=${`program-${f}`} class=${f===J.value?"on":""}
          onClick=${()=>Dt(f)} onKeyDown=${p=>x(p,f)}>
          <td class="r">${f+1}</td>
          <td>${b.unit}${!Us.includes(h.view??"")&&r`<small>${h.view}</small>`}${c.kernels.length>1&&r`<small>${Js(c)}</small>`}</td>
          <td>${qe(b,o)}</td><td>${qe(b,i)}</td><td class="options">${Fs(b)}</td>
          <td class="wide"><${Ot} kernels=${Z(c)} device=${s} longest=${$} /></td>
          <td class="r strong">${g(c.seconds)}</td><td class="r">${h.waves}</td><td class="r">${v(h.occupancy)}</td></tr>`})}</tbody></table></div>
    ${a.length>Wt&&r`<button class="more" onClick=${()=>e(!t)}>${t?"fewer":`all ${a.length}`}</button>`}
    ${d.length>0&&r`<details class="quiet"><summary>${k(d.length,"unit")} refused</summary><ul>${d.map(c=>r`<li>${c}</li>`)}</ul></details>`}
  </section>`}var Ws=({dtype:t,shape:e})=>`("${t}", (${e.join(", ")}${e.length===1?",":""}))`,Vs=t=>t.includes(`
`)?`"""
${t.replaceAll("\\","\\\\").replaceAll('"""','\\"\\"\\"')}
"""`:JSON.stringify(t);function Vt(t){return t===null?"None":typeof t=="boolean"?t?"True":"False":Array.isArray(t)?`[${t.map(Vt).join(", ")}]`:typeof t=="object"?`{${Object.entries(t).map(([e,s])=>`${JSON.stringify(e)}: ${Vt(s)}`).join(", ")}}`:JSON.stringify(t)}function Ys({expression:t,inputs:e,outputs:s,target:a,hardware:n,options:o}){let i=Object.entries(e).map(([l,$])=>`        "${l}": ${Ws($)},`),u=Object.entries({...s&&{outputs:s},...o}).map(([l,$])=>`    ${l}=${Vt($)},
`),d=Object.keys(e).map(l=>`"${l}": ${l}`).join(", ");return`import roller_svc

kernel = roller_svc.compile(
    ${Vs(t)},
    inputs={
${i.join(`
`)}
    },
    ${n?"hardware=spec,  # the changed spec: YAML or JSON text":`target=${JSON.stringify(a)}`},
${u.join("")})
results = kernel.run({${d}})`}var zs=t=>`'${t.replaceAll("'","'\\''")}'`,Ke='-H "Authorization: Bearer $ROLLER_API_KEY"',Xs=t=>`curl -s "$ROLLER_SERVER/v1/kernels:compile" ${Ke} \\
  -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
  -d ${zs(JSON.stringify(t))}`,He=(t,e)=>`curl -s "$ROLLER_SERVER/v1/kernels/${t}/bundle?launcher=${e}" ${Ke} -o kernel.zip
unzip -q kernel.zip -d kernel`,Zs=t=>`# with kernel/ in sys.path
import launch

results = launch.Kernel()(${Object.keys(t.inputs).map(e=>`${e}=${e}`).join(", ")})`,Tt=t=>(e,s)=>`${He(e,t)}

${Zs(s)}`,Ue=(t,e)=>(s,a,n)=>`${He(s,"cpp")}

#include "kernel/${t}"
${e(n)}`,Qs={ctypes:Tt("ctypes"),torch:Tt("torch"),"c++":Ue("kernel.h",t=>`// ${t}_run(...) takes the addresses of inputs and results`)},ta={cupy:Tt("cupy"),torch:Tt("torch"),"c++":Ue("launch.hpp",t=>`${t}_launcher kernel;  // then kernel.load(image) and kernel.launch(addresses..., stream)`)};function Ge(t,e){let s={python:Ys(t),curl:Xs(t)};if(!e)return s;let a=e.launches[0].name.replace(/_kernel\d+$/,""),n=Object.entries(e.language==="c"?Qs:ta);return{...s,...Object.fromEntries(n.map(([o,i])=>[o,i(e.digest,t,a)]))}}var ea=/(\/\/.*$|\/\*.*?\*\/|"[^"]*"|#\s*\w+|\b\d[\w.]*\b|\b[A-Za-z_]\w*\b)/,sa=new Set("alignas auto bool break case char const constexpr continue do double else extern float for if inline int long return short signed sizeof static struct switch template typename unsigned void volatile while".split(" ")),aa=t=>/^(\/\/|\/\*)/.test(t)?"comment":/^["#]/.test(t)?"string":/^\d/.test(t)?"number":sa.has(t)||/^__\w+__$/.test(t)?"word":/^(wgmma|tma|mma|mbarrier|barrier|cp_async|ldmatrix|_mm)/.test(t)?"instruction":null,na=({text:t})=>t.split(ea).map(e=>{let s=e&&aa(e);return s?r`<i class=${s}>${e}</i>`:e}),St=new Map;function oa(t,e){let[s,a]=O(null),n=`/v1/kernels/${t}/${e}`;return R(()=>{if(!t)return;let o=!1;return St.has(n)||St.set(n,se(n)),a(null),St.get(n).then(i=>o||a({text:i}),i=>{St.delete(n),o||a({error:i.message})}),()=>o=!0},[n]),s}function ra({digest:t,kind:e}){let s=oa(t,e);if(!s)return r`<p class="quiet" role="status">Reading ${e}…</p>`;if(s.error)return r`<p class="bad" role="status">${s.error}</p>`;let a=s.text.split(`
`);return r`<div class="listing" data-testid=${e} tabindex="0" role="group" aria-label=${e}><pre>${a.map((n,o)=>r`<span class="line"><i class="at">${o+1}</i><${na} text=${n} />${`
`}</span>`)}</pre></div>`}function ia(){let[t,e]=O("python"),[s,a]=O(!1),n=Ge(W.value,F.value),o=n[t]??n.python,i=async()=>{await navigator.clipboard.writeText(o),a(!0),setTimeout(()=>a(!1),1500)};return r`<div class="launch"><h3>Use it</h3>
    <div class="choices">${Object.keys(n).map(u=>r`<button aria-pressed=${u===t} onClick=${()=>e(u)}>${u}</button>`)}<button onClick=${i}>${s?"copied":"copy"}</button></div>
    <pre data-testid="launch-code" tabindex="0">${o}</pre></div>`}function la({kernel:t}){let e=["source",...t.language==="cuda"?["ptx","sass"]:[]],s=e.includes(yt.value)?yt.value:"source",[a]=t.resources,[n]=t.launches,o=[n&&`${k(t.launches.length,"launch").replace("launchs","launches")}`,t.language!=="c"&&n&&`grid ${n.grid.join("×")}, block ${n.block.join("×")}`,a?.registers_per_thread>0&&`${a.registers_per_thread} registers`,a?.shared_bytes>0&&`${w(a.shared_bytes)} shared`,a?.spill_bytes>0&&`spills ${w(a.spill_bytes)}`].filter(Boolean);return r`<p class="quiet">${o.join(" · ")} · <a class="mono" href=${`/k/${t.digest}`}>${t.digest.slice(0,19)}</a></p>
    ${m.value&&xt.value<0&&r`<p class="note">The kernel is none of the programs above.</p>`}
    ${t.notes.map(i=>r`<p class="note">${i}</p>`)}
    <div class="choices">${e.map(i=>r`<button aria-pressed=${i===s} onClick=${()=>yt.value=i}>${i}</button>`)}</div>
    <${ra} digest=${t.digest} kind=${s} />`}function Yt(){let t=F.value;return r`<section class="panel" aria-labelledby="text-title"><header><h2 id="text-title">Kernel</h2></header>
    ${t?r`<${la} kernel=${t} />`:r`<p class="quiet">Not compiled: all of the above is the model's word. Compile builds the first program.</p>`}
    ${G.value&&r`<${ia} />`}</section>`}var z=460,X=280,at=54,it=34,Fe=14,lt=14;function ca({terms:t,operations:e}){let s=t.filter(n=>n.unit==="operations").sort((n,o)=>o.amount-n.amount),a=t.find(n=>n.name==="compute");return s[0]?.rate??(a&&e.executed/a.seconds)}function Je(){let{device:t}=m.value,e=T.value,s=e.operations.executed,a={name:e.program.unit,rate:ca(e)},n=t.levels.filter(o=>o.name!==t.tile_levels[1]).map(o=>({level:o,term:e.terms.find(i=>i.name===o.name&&i.unit==="B"&&i.amount>0)})).filter(({term:o})=>o).map(({level:o,term:i})=>({name:o.name,rate:i.rate,moved:i.amount,intensity:s/i.amount,assumed:i.source==="assumed",fill:M(t,o.name)}));return{kernel:e,operations:s,unit:a,levels:n,reached:s/e.seconds}}function We(){let{unit:t,levels:e,reached:s}=Je();if(!e.length||!(t.rate>0)||!(s>0))return null;let a=t.rate,n=e.flatMap(c=>[c.intensity,a/c.rate]),o=Math.min(...n)/4,i=Math.max(...n)*4,u=Math.max(a,s)*2.5,d=Math.min(s,a/30)/4,l=c=>at+(z-at-lt)*Math.log(c/o)/Math.log(i/o),$=c=>X-it-(X-it-Fe)*Math.log(c/d)/Math.log(u/d),x=`${E(s,"operations")} of ${E(a,"operations")}: `+e.map(c=>`${c.name} ${pt(c.intensity)} op per byte`).join(", ");return r`<figure class="roofline"><svg viewBox=${`0 0 ${z} ${X}`} data-testid="roofline" role="img" aria-label=${x}>
    ${jt(o,i).map(c=>r`<line x1=${l(c)} x2=${l(c)} y1=${Fe} y2=${X-it} class="grid" />
      <text x=${l(c)} y=${X-it+13} class="tick" text-anchor="middle">${c<1?c.toPrecision(1):dt(c)}</text>`)}
    ${jt(d,u).map(c=>r`<line x1=${at} x2=${z-lt} y1=${$(c)} y2=${$(c)} class="grid" />
      <text x=${at-5} y=${$(c)+3} class="tick" text-anchor="end">${I(c,"").trim()}</text>`)}
    <text x=${(at+z)/2} y=${X-4} class="label" text-anchor="middle">operations per byte of a level</text>
    <text x=${-(X-it)/2} y="11" class="label" text-anchor="middle" transform="rotate(-90)">operations per second</text>
    <line x1=${l(Math.max(o,a/Math.max(...e.map(c=>c.rate))))} x2=${z-lt} y1=${$(a)} y2=${$(a)} class="roof" />
    <text x=${z-lt} y=${$(a)-4} class="tick strong" text-anchor="end">${t.name} ${E(a,"operations")}</text>
    ${e.map(c=>{let f=Math.max(o,d/c.rate),h=Math.min(i,a/c.rate);return r`<line x1=${l(f)} y1=${$(f*c.rate)} x2=${l(h)} y2=${$(h*c.rate)} style=${`stroke:${c.fill};stroke-width:2`} />`})}
    <line x1=${at} x2=${z-lt} y1=${$(s)} y2=${$(s)} class="reached" />
    ${e.map(c=>r`<line x1=${l(c.intensity)} x2=${l(c.intensity)} y1=${$(s)} y2=${$(Math.min(a,c.intensity*c.rate))} style=${`stroke:${c.fill}`} class="headroom" />
      <circle cx=${l(c.intensity)} cy=${$(s)} r="5.5" style=${`fill:${c.fill}`}><title>${c.name}: ${w(c.moved)}, ${pt(c.intensity)} op/B</title></circle>`)}
  </svg><figcaption>A dot is below its own line by the bandwidth that its level leaves unused.</figcaption></figure>`}function Ve(){let{kernel:t,operations:e,unit:s,levels:a}=Je(),n=(o,i)=>v(o/i/t.seconds);return r`<table class="levels"><thead><tr><th>level</th><th class="r">moves</th><th class="r">op/B</th><th class="r">busy</th></tr></thead><tbody>
    ${a.map(o=>r`<tr><th scope="row"><i class="dot" style=${`--c:${o.fill}`}></i>${o.name}${o.assumed?r`<small title="the rate is assumed, not measured"> ?</small>`:""}</th>
      <td class="r">${w(o.moved)}</td><td class="r">${pt(o.intensity)}</td><td class="r">${n(o.moved,o.rate)}</td></tr>`)}
    ${s.rate>0&&r`<tr><th scope="row"><i class="dot" style="--c:var(--compute)"></i>${s.name}</th><td class="r" colspan="2">${I(e,"operations")}</td><td class="r">${n(e,s.rate)}</td></tr>`}
  </tbody></table>`}var ze=.01,ua=5,Ye=t=>t.reduce((e,s)=>e+y(s),0),ct=({name:t})=>r`<i class="dot" style=${`--c:${M(m.value.device,t)}`}></i>`;function $a({amount:t,unit:e,rate:s,source:a}){return e!=="B"&&e!=="operations"?"":`${I(t,e)} at ${E(s,e)}${a==="assumed"?" (assumed)":""}, `}function da(t){let[e,s]=rt(t);if(e){let[o,...i]=e.terms,u=i.length?`${g(y(o))} of ${g(e.seconds)}, to which ${i.map(d=>d.name).join(", ")} add`:`${$a(o)}${g(e.seconds)}`;return r`<li><${ct} name=${o.name} /><b>${o.name} takes longest</b>: ${u}.
      ${s&&` ${s.name} beside it would be done after ${g(s.seconds)}.`}</li>`}let[a,n]=Jt(t).sort((o,i)=>y(i)-y(o));return a?r`<li><${ct} name=${a.name} /><b>Mostly ${a.name}</b>: ${v(y(a)/t.seconds)} of the time${n&&`, then ${n.name} with ${v(y(n)/t.seconds)}`}. These terms add up.</li>`:null}function pa({name:t,unit:e}){return e==="B"?`${t} bandwidth`:Kt.includes(t)&&e==="operations"?"arithmetic rate":"issue rate"}function ma({limited_by:t=[]},e){let[s]=t,a=rt(e)[0]?.terms[0];if(!a||!s||s.saved<ze)return null;let n=pa(a),o=t.find(i=>i.resource===n)??{resource:n,saved:0};return s===o||s.saved<2*o.saved?null:r`<li><${ct} name=${s.resource.split(" ")[0]} /><b>But ${s.resource} limits</b>: 10 % more of it saves ${v(s.saved)},
    10 % more ${o.resource} ${o.saved<5e-4?"nothing":`only ${v(o.saved)}`}.</li>`}function fa(t){let e=Z(t),s=e.flatMap(Jt);if(!e.some(o=>rt(o).length)||Ye(s)<ze*t.seconds)return null;let a=new Map;for(let o of s)a.set(o.name,(a.get(o.name)??0)+y(o));let n=[...a].map(([o,i])=>`${o} ${g(i)}`).join(", ");return r`<li><${ct} name="exposed" />Not hidden: ${n}. That is ${v(Ye(s)/t.seconds)} of the time.</li>`}function ha({operations:t}){let e=t.executed/t.definition;return Math.abs(e-1)>.02?r`<li><${ct} name="compute" />It executes ${I(t.executed,"operations")}, ${v(e)} of the${" "}
    ${I(t.definition,"operations")} of the definition.</li>`:null}function ga(t){let e=ot(t);return e.length?r`<li data-testid="once"><i class="dot" style="--c:var(--ink-3)"></i>Once, before all calls: ${g(e.reduce((s,a)=>s+a.seconds,0))}${" "}
    of ${e.map(s=>s.group).join(", ")}, of constants alone. No call has it.</li>`:null}function ba(t,e){return e?r`<li><i class="dot" style="--c:var(--ink-3)"></i>No tiles go below ${g(e.seconds)}${" "}
    (${e.arithmetic_seconds>e.traffic_seconds?`${I(e.operations,"operations")} on ${e.unit}`:`${w(e.bytes)} once through ${e.level}`}):${" "}
    this is ${U(t.seconds/e.seconds)} that.</li>`:null}function va(t){let e=F.value?.measurement?.median_s;if(!e)return null;let s=t.seconds/e-1;return r`<li><i class="dot" style="--c:var(--good)"></i>Measured ${g(e)}: the estimate is ${v(Math.abs(s))} ${s>0?"high":"low"}.</li>`}function ya({resources:t}){if(!t)return r`<p class="quiet" data-testid="sensitivity">What more of each resource saves is known of the first program.</p>`;let e=t.filter(s=>s.saved>5e-4).slice(0,ua);return r`<div data-testid="sensitivity"><h3>10 % more of … saves</h3>
    ${e.map(({resource:s,saved:a})=>r`<div class="saves"><span>${s}</span>
      <svg height="8" width="100%" aria-hidden="true"><rect width=${`${Math.min(100,1e3*a)}%`} height="8" style=${`fill:${M(m.value.device,s.split(" ")[0])}`} /></svg>
      <em>${(100*a).toFixed(1)} %</em></div>`)}
    ${!e.length&&r`<p class="quiet">Nothing above 0.05 %.</p>`}</div>`}function Xe(){let{device:t,floor:e}=m.value,s=$e.value,a=T.value,n=Z(s),o=[["bound",r`<span style=${`color:${q(t,s.bound)}`}>${s.bound}</span>`],e&&["above the floor",U(s.seconds/e.seconds)],["rate",E(ne(s)/s.seconds,"operations")],["waves",a.waves],["occupancy",v(a.occupancy)],s.uncertainty&&["true within",U(s.uncertainty)]].filter(Boolean);return r`<section class="panel verdict" aria-labelledby="verdict-title" data-testid="verdict">
    <h2 class="unseen" id="verdict-title">Verdict</h2>
    <div class="headline"><p class="big" data-testid="estimate">${g(s.seconds)}</p>
      <dl>${o.map(([i,u])=>r`<div><dt>${i}</dt><dd>${u}</dd></div>`)}</dl></div>
    <${Ot} kernels=${n} device=${t} longest=${s.seconds} height=${26} />
    <${Pe} kernels=${n} device=${t} />
    <div class="why"><div>
        <ul class="sentences">${da(a)}${ma(s,a)}${fa(s)}${ha(a)}${ga(s)}${ba(s,e)}${J.value===xt.value&&va(s)}</ul>
        <div class="facts"><${ya} resources=${s.limited_by} /><${Ve} /></div></div>
      <${We} /></div>
  </section>`}var xa=()=>r`<svg width="18" height="18" viewBox="0 0 18 18" aria-hidden="true">
  <rect width="18" height="18" rx="2" style="fill:var(--outer)" />
  <rect width="12" height="12" style="fill:var(--block)" />
  <rect width="6" height="6" style="fill:var(--thread)" />
</svg>`,wa=[["Kernel","/"],["Model","/m"],["Farm","/farm"]],Et=/^\/m(\/|$)/.test(location.pathname)?"/m":location.pathname==="/farm"?"/farm":"/";function ka({address:t}){let[e,s]=O(!1),a=async o=>{o.preventDefault(),await navigator.clipboard.writeText(new URL(t.value,location.href).href),s(!0),setTimeout(()=>s(!1),1500)},n=Pt.value==="dark"?"light":"dark";return r`<header class="top">
    <a class="brand" href="/"><${xa} /><b>roller</b></a>
    <nav aria-label="pages">${wa.map(([o,i])=>r`<a href=${i} aria-current=${i===Et?"page":null}>${o}</a>`)}</nav>
    <a class="link" data-testid="permalink" href=${t.value} onClick=${a}>${e?"copied":"copy link"}</a>
    <button class="theme" onClick=${()=>Pt.value=n}>${n}</button>
  </header>`}function Ma(){let t=bt.value&&r`<p class="note" data-testid="remark">${bt.value}</p>`;return!m.value&&F.value?r`${t}<${Yt} />`:m.value?r`${P.value&&!bt.value&&r`<p class="note">Below is the last program ${kt.value?"without errors":"that was explained"}.</p>`}${t}<${Xe} /><${Ee} /><${De} /><${Yt} />`:r`<p class="waiting" role="status">${P.value?"":"Constructing tiles…"}</p>`}var _a=()=>r`<main class="kernel"><h1 class="unseen">Why this tile</h1><${Re} /><div class=${["work",P.value&&"old",tt.value&&"waits"].filter(Boolean).join(" ")} aria-busy=${tt.value}><${Ma} /></div></main>`,Ct=Et==="/m"?await import("./modelpage-DNYGARK6.js"):Et==="/farm"?await import("./farm-5YBVZUZJ.js"):{Page:_a,address:de,load:ke};document.title={"/":"roller: see why this tile","/m":"roller: a model","/farm":"roller: the build farm"}[Et];var Oa=()=>r`<${Be} /><${ka} address=${Ct.address} /><${Ie} load=${Ct.load} /><${Ct.Page} />`;Ct.load();zt(r`<${Oa} />`,document.getElementById("app"));
